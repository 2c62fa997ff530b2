"""Where the kernel and the drivers say what there is: files below a root, so that a test can write another machine."""

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
    """Whether something disciplines the system's clock; None where the kernel does not say."""
    libc = ctypes.CDLL(None, use_errno=True)
    state = libc.adjtimex(ctypes.create_string_buffer(256))  # struct timex with modes = 0: asks, and sets nothing
    return None if state < 0 else state != _UNSYNCHRONISED


@dataclass(frozen=True)
class Machine:
    """What is not in a file is a field."""

    root: Path = Path("/")
    release: str = field(default_factory=lambda: os.uname().release)
    processors: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))
    limits: Mapping[str, int] = field(default_factory=_limits)  # soft ones; -1: none
    clock_synchronised: bool | None = field(default_factory=_clock_synchronised)

    def path(self, name: str) -> Path:
        """`name` is absolute."""
        return self.root / name.lstrip("/")

    def read(self, name: str) -> str | None:
        """None where there is no such file, or none that one may read."""
        try:
            return self.path(name).read_text(errors="replace")
        except OSError:
            return None

    def entries(self, name: str) -> list[Path]:
        """Of a directory; none where there is none."""
        try:
            return sorted(self.path(name).iterdir())
        except OSError:
            return []
