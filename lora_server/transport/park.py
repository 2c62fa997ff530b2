"""Spin a little, then sleep on a futex: how both sides wait for a signal word in shared memory.

The spin is 20 us, and longer (up to 200 us) only while waits turn out to be that short: waking a
sleeper costs some 50 us, which counts beside a wait of 100 us and not beside one of 1000.

A *parking word* (u32, shared) is 1 while its owner sleeps or is about to. The owner stores 1, looks
once more at the signal that it waits for, and sleeps only while the word is still 1. The other side
stores the signal first; if it then sees 1, it stores 0 and wakes the owner.

That is Dekker's pattern: each side stores, then loads what the other stores, and x86 may let the
load overtake the store. Instead of a fence on every push, the sleeper pays: membarrier(2) makes
every registered thread of the host pass a full barrier, so either the waker sees the 1, or the
sleeper sees the signal. Without membarrier the sleep is cut to 1 ms. Payload-before-signal order
comes from x86's total store order; other architectures are refused.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import time
from collections.abc import Callable

from lora_server.errors import ConfigError

SPIN_SECONDS, MAX_SPIN_SECONDS = 20e-6, 200e-6
SLEEP_SECONDS, LOOK_SECONDS = 0.1, 0.02  # of a shard; of a client, which then looks whether its shard lives
UNORDERED_SECONDS = 1e-3  # of a sleep without membarrier

_SYS_FUTEX, _SYS_MEMBARRIER = 202, 324
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_MEMBARRIER_GLOBAL_EXPEDITED, _MEMBARRIER_REGISTER = 2, 4

_libc = ctypes.CDLL(None, use_errno=True)
_syscall = _libc.syscall
_syscall.restype = ctypes.c_long


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def require_total_store_order(machine: str = "") -> None:
    """Raise ConfigError on a machine where a core may see another's stores out of order."""
    machine = machine or platform.machine()
    if machine.lower() not in ("x86_64", "amd64"):
        raise ConfigError(
            f"shared memory transport: got a {machine} CPU, expected x86_64 (total store order), "
            "since payload and signal are plain stores; use transport tcp"
        )


def register() -> bool:
    """Take part in other processes' membarrier; once per process, before any push. False if refused."""
    return bool(_syscall(_SYS_MEMBARRIER, _MEMBARRIER_REGISTER, 0, 0) == 0)


def barrier() -> None:
    """Make every registered thread of the host pass a full memory barrier."""
    _syscall(_SYS_MEMBARRIER, _MEMBARRIER_GLOBAL_EXPEDITED, 0, 0)


class Parker:
    """A parking word: its owner waits on it, others wake the owner. `word` is four bytes of (shared) memory."""

    def __init__(self, word: memoryview) -> None:
        require_total_store_order()
        self._word = word.cast("I")
        self._anchor = ctypes.c_uint32.from_buffer(word)
        self._address = ctypes.c_void_p(ctypes.addressof(self._anchor))
        self._sleep_seconds = LOOK_SECONDS if register() else UNORDERED_SECONDS
        self._spin_seconds = SPIN_SECONDS

    def wait(self, ready: Callable[[], bool], deadline: float) -> bool:
        """Return whether `ready()` came true before `deadline` (time.monotonic()), or one sleep ended early.

        Returns at the latest after one bounded sleep, so that the caller can look at other things
        (liveness, stop flags); the caller loops until its own deadline.
        """
        if ready():
            return True
        began = time.monotonic()
        spin_until = min(began + self._spin_seconds, deadline)
        while time.monotonic() < spin_until:
            if ready():
                return True
        self._park(ready, deadline)
        waited = time.monotonic() - began
        self._spin_seconds = min(2 * waited, MAX_SPIN_SECONDS) if waited < MAX_SPIN_SECONDS else SPIN_SECONDS
        return ready()

    def _park(self, ready: Callable[[], bool], deadline: float) -> None:
        self._word[0] = 1
        barrier()
        if not ready():
            self._sleep(min(self._sleep_seconds, deadline - time.monotonic()))
        self._word[0] = 0

    def _sleep(self, seconds: float) -> None:
        if seconds <= 0:
            return
        timeout = _Timespec(int(seconds), int(seconds % 1 * 1e9))
        if _syscall(_SYS_FUTEX, self._address, _FUTEX_WAIT, 1, ctypes.byref(timeout), None, 0) != 0:
            code = ctypes.get_errno()
            if code not in (errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT):
                raise OSError(code, "futex wait")

    def wake(self) -> None:
        """Wake the owner if it is parked; what it waits for must be stored already."""
        if self._word[0]:
            self._word[0] = 0
            _syscall(_SYS_FUTEX, self._address, _FUTEX_WAKE, 1, None, None, 0)
