"""What a check found."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class State(StrEnum):
    """FAILED: a node does not start, or not with what it was told. WARNING: it serves, but slower, or not for long."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"


@dataclass(frozen=True)
class Finding:
    """`cure` is there unless all is well."""

    check: str
    state: State
    found: str
    cure: str = ""


def ok(check: str, found: str) -> Finding:
    """All is well."""
    return Finding(check, State.OK, found)


def warning(check: str, found: str, cure: str) -> Finding:
    """It will serve; this would make it better."""
    return Finding(check, State.WARNING, found, cure)


def failed(check: str, found: str, cure: str) -> Finding:
    """It will not."""
    return Finding(check, State.FAILED, found, cure)
