"""Findings of a stage: JSON objects, one per line, on disk as soon as they are known."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Record:
    """Appends to a file. A stage that was cut finds what it had found before, and need not do it again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.read_bytes().endswith(b"\n"):
            with path.open("ab") as file:
                file.write(b"\n")  # after half a line of a stage that was killed

    def add(self, kind: str, **facts: Any) -> None:
        """One line; `kind` says what sort of thing it is."""
        with self.path.open("ab") as file:
            file.write(json.dumps({"kind": kind, **facts}).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def attempt(self, kind: str, name: str, step: Callable[[], object], **about: Any) -> bool:
        """Take a step, and add what it found, or the error that it raised. Returns whether it found something."""
        began = time.monotonic()
        try:
            facts: dict[str, Any] = {"good": True, "found": step()}
        except Exception as problem:
            facts = {"good": False, "reason": f"{type(problem).__name__}: {problem}"[:600]}
        self.add(kind, **about, name=name, **facts, seconds=round(time.monotonic() - began, 1))
        return bool(facts["good"])

    def find(self, kind: str, **like: Any) -> list[dict[str, Any]]:
        """The lines of a kind with these facts, oldest first."""
        return picked(read(self.path), kind, **like)


class Checks:
    """Answers that are right or wrong, a line each; `good`: none was wrong."""

    def __init__(self, record: Record) -> None:
        self._record, self.good = record, True

    def judge(self, name: str, right: bool) -> None:
        """One of them."""
        self._record.add("check", name=name, good=right)
        self.good = self.good and right


def read(path: Path) -> list[dict[str, Any]]:
    """Read all lines, without one that was cut while it was written. Empty if the file does not exist."""
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")[:-1]
    return [found for line in lines if (found := _object(line)) is not None]


def picked(lines: list[dict[str, Any]], kind: str, **like: Any) -> list[dict[str, Any]]:
    """Select the lines of a kind with these facts."""
    wanted = {"kind": kind, **like}
    return [line for line in lines if all(line.get(name) == value for name, value in wanted.items())]


def _object(line: bytes) -> dict[str, Any] | None:
    """None for half a line, which a killed stage may have left before it was started again."""
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None
