"""Large buffers that a process frees go back to the system at once."""

from __future__ import annotations

import contextlib
import ctypes

LARGE_BYTES = 128 << 10
_M_MMAP_THRESHOLD = -3


def give_back_large() -> None:
    """Make glibc unmap freed buffers of any size, which it otherwise keeps up to 32 MB. Call before threads start."""
    with contextlib.suppress(AttributeError):  # another libc
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES)
