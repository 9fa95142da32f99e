"""Settings of the C heap for the large arrays that products and collectives allocate again and again."""

from __future__ import annotations

import contextlib
import ctypes

# mallopt's parameters, as glibc numbers them.
TRIM_THRESHOLD, TOP_PAD, MMAP_THRESHOLD = -1, -2, -3
KEPT = 2**30  # bytes of free memory at the end of the heap that stay with the process
LARGEST = 2**25  # bytes; larger arrays come from the system and return to it. glibc accepts no more
STEP = 2**26  # bytes by which the heap grows; those not yet used take no memory


def keep_freed_memory() -> None:
    """Let the C library give freed arrays to the next allocation instead of back to the system.

    Workspace is allocated and freed by every product. Without this each of its pages is unmapped, faulted in and zeroed
    again: 12 000 faults, a tenth of the processor time, in a 2048³ product on 8 ranks. Does nothing without glibc.
    """
    with contextlib.suppress(OSError, AttributeError, TypeError):
        mallopt = ctypes.CDLL(None).mallopt
        for parameter, value in ((MMAP_THRESHOLD, LARGEST), (TRIM_THRESHOLD, KEPT), (TOP_PAD, STEP)):
            mallopt(parameter, value)
