"""The files that checks read, below a root, so that a test can write another machine."""

from __future__ import annotations

import ctypes
import os
import resource
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

_UNSYNCHRONISED = 5  # TIME_ERROR of adjtimex(2)


def _limits() -> dict[str, int]:
    return {name: resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))[0] for name in ("NOFILE", "MEMLOCK")}


def _clock_synchronised() -> bool | None:
    """Ask whether the system's clock is synchronised; None if the kernel does not say."""
    libc = ctypes.CDLL(None, use_errno=True)
    state = libc.adjtimex(ctypes.create_string_buffer(256))  # struct timex with modes = 0: asks, and sets nothing
    return None if state < 0 else state != _UNSYNCHRONISED


@dataclass(frozen=True)
class Machine:
    """A machine: its files below `root`, and the facts that are in no file."""

    root: Path = Path("/")
    release: str = field(default_factory=lambda: os.uname().release)
    processors: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))
    limits: Mapping[str, int] = field(default_factory=_limits)  # soft ones; -1: none
    clock_synchronised: bool | None = field(default_factory=_clock_synchronised)

    def path(self, name: str) -> Path:
        """Locate an absolute `name` below the root."""
        return self.root / name.lstrip("/")

    def read(self, name: str) -> str | None:
        """Read a file; None if it is missing or unreadable."""
        try:
            return self.path(name).read_text(errors="replace")
        except OSError:
            return None

    def entries(self, name: str) -> list[Path]:
        """List a directory; a missing one is empty."""
        try:
            return sorted(self.path(name).iterdir())
        except OSError:
            return []
