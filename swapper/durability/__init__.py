"""What makes a step durable: commits, recovery, snapshots, their publication and verification, the run directory."""
