"""Services of the running process: counters, traces, statistics, interrupts, the watchdog, free memory, checked records."""
