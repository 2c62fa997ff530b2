"""Memory that can be given up at once, whatever still refers to it.

Views of a region live on in tensors, in tracebacks, in cycles that wait for the collector; a session that
was left must not keep its shared pages and descriptors until then. `drop` puts private zeros where the
pages were: views stay valid, show no other client's data, and cost nothing until they are written to.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os

_libc = ctypes.CDLL(None, use_errno=True)
_mmap = _libc.mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_FAILED = ctypes.c_void_p(-1).value


class Mapping:
    """`nbytes` of a descriptor, shared; or private zeros without one. `view` is all of it, page-aligned.

    Keeps no descriptor, unlike mmap.mmap, so the caller may close its own at once.
    """

    def __init__(self, nbytes: int, fd: int = -1) -> None:
        """Map the memory; raises OSError, also for a descriptor of fewer bytes."""
        if fd >= 0 and os.fstat(fd).st_size < nbytes:
            raise OSError(errno.EINVAL, f"got memory of {os.fstat(fd).st_size} bytes, expected {nbytes}")
        self._reserved = mmap.mmap(-1, nbytes)  # its end unmaps whatever lies there then
        self._nbytes = nbytes
        if fd >= 0:
            self._put(mmap.MAP_SHARED, fd)
        self.view = memoryview(self._reserved)

    def _put(self, flags: int, fd: int) -> None:
        anchor = ctypes.c_char.from_buffer(self._reserved)
        address = ctypes.addressof(anchor)
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        if _mmap(address, self._nbytes, protection, flags | _MAP_FIXED, fd, 0) == _FAILED:
            code = ctypes.get_errno()
            raise OSError(code, f"mmap of {self._nbytes} bytes")

    def give_back(self, begin: int, end: int) -> None:
        """Give back whole pages that neither side uses; both read zeros when they touch them again."""
        with contextlib.suppress(OSError):  # it was dropped meanwhile, or the kernel cannot
            self._reserved.madvise(mmap.MADV_REMOVE, begin, end - begin)

    def drop(self) -> None:
        """Give the pages up; idempotent. From any thread: every access sees the old pages or zeros."""
        self._put(mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE, -1)
