"""The outcome of a check."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


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
