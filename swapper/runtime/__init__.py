"""What every part of swapper needs while it runs: counters, traces, interrupts, teardown, what memory the system grants."""
