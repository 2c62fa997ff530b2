"""The files that checks read, below a root, so that a test can write another machine, and what checks find."""

from __future__ import annotations

import ctypes
import os
import resource
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
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


class Outcome(StrEnum):
    """FAILED: a node does not start, or not with its settings. WARNING: it serves, but slower, or not for long."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"


@dataclass(frozen=True)
class Finding:
    """The result of one check; `cure` is empty if the outcome is OK."""

    check: str
    state: Outcome
    found: str
    cure: str = ""


def ok(check: str, found: str) -> Finding:
    """Make a finding without a cure."""
    return Finding(check, Outcome.OK, found)


def warning(check: str, found: str, cure: str) -> Finding:
    """Make a finding about a node that serves, but could serve better."""
    return Finding(check, Outcome.WARNING, found, cure)


def failed(check: str, found: str, cure: str) -> Finding:
    """Make a finding about a node that would not start."""
    return Finding(check, Outcome.FAILED, found, cure)
