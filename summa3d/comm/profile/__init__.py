"""What was moved, when, and how long it took: the ledger, the trace, a device's timeline and ranges for a profiler."""
