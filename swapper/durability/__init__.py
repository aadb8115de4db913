"""Makes steps durable: the run directory, commits, recovery, snapshots, their publication and verification."""
