"""Profiling: the ledger of words and seconds, the trace, the timeline of a device, and NVTX ranges."""
