"""Finds locks that threads take in more than one order: each may then wait for the other for ever.

    python -m pytest -p tests.lock_order tests/unit/memory

Wraps every lock that a line of the product makes. Locks of one line count as one; a line that holds one of its locks
while it takes another is not judged. The run fails where "was held when the other was taken" has a circle.
"""

from __future__ import annotations

import itertools
import sys
import threading
import traceback
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = tuple(f"{ROOT / part}/" for part in ("lora_server", "client_connector", "provisioning"))
NEW = {"Lock": threading.Lock, "RLock": threading.RLock}


class LockOrder:
    """Which lock was held when another was taken, by the lines that made them, with a stack for each pair."""

    def __init__(self) -> None:
        self.circles: list[str] = []
        self._after: dict[str, dict[str, str]] = defaultdict(dict)
        self._guard, self._local = NEW["Lock"](), threading.local()

    @property
    def held(self) -> list[OrderedLock]:
        """Locks of this thread, in the order in which it took them."""
        if not hasattr(self._local, "held"):
            self._local.held = []
        return self._local.held

    def note(self, wanted: OrderedLock) -> None:
        """Take that this thread waits for a lock."""
        for held in self.held:
            if held.line == wanted.line or wanted.line in self._after[held.line]:
                continue
            with self._guard:
                self._after[held.line][wanted.line] = "".join(traceback.format_stack(limit=16)[:-2])
                if way := self._way(wanted.line, held.line):
                    pairs = [(held.line, wanted.line), *itertools.pairwise(way)]
                    self.circles.append("\n".join(f"{a}, then {b}:\n{self._after[a][b]}" for a, b in pairs))

    def _way(self, begin: str, end: str) -> list[str]:
        ways, seen = [[begin]], set()
        while ways:
            way = ways.pop()
            if way[-1] == end:
                return way
            if way[-1] not in seen:
                seen.add(way[-1])
                ways += [[*way, after] for after in self._after[way[-1]]]
        return []


class OrderedLock:
    """A lock that notes its order; has what `threading.Condition` uses of one."""

    def __init__(self, kind: str, line: str, order: LockOrder) -> None:
        self.line, self._order, self._lock = line, order, NEW[kind]()
        self._release = getattr(self._lock, "_release_save", None)

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """As `threading.Lock.acquire`."""
        if blocking and self not in self._order.held:
            self._order.note(self)
        if taken := self._lock.acquire(blocking, timeout):
            self._order.held.append(self)
        return taken

    def release(self) -> None:
        """As `threading.Lock.release`; another thread may have taken it."""
        held = self._order.held
        if self in held:
            del held[len(held) - 1 - held[::-1].index(self)]
        self._lock.release()

    def locked(self) -> bool:
        """As `threading.Lock.locked`."""
        return self._lock.locked()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()

    def _is_owned(self) -> bool:
        return self in self._order.held

    def _release_save(self) -> tuple[object, int]:
        times = self._order.held.count(self)
        self._order.held[:] = [one for one in self._order.held if one is not self]
        return (self._release() if self._release else self._lock.release()), times

    def _acquire_restore(self, saved: tuple[object, int]) -> None:
        self._order.note(self)
        if self._release:
            self._lock._acquire_restore(saved[0])
        else:
            self._lock.acquire()
        self._order.held.extend([self] * saved[1])

    def _at_fork_reinit(self) -> None:
        self._lock._at_fork_reinit()


class _Maker:
    """Stands for `threading.Lock`; no function, so that a class may have it as an attribute."""

    def __init__(self, kind: str, order: LockOrder) -> None:
        self._kind, self._order = kind, order

    def __call__(self) -> object:
        frame, via = sys._getframe(1), ""
        while frame.f_back is not None and frame.f_code.co_filename == threading.__file__:
            frame, via = frame.f_back, frame.f_code.co_qualname
        name = frame.f_code.co_filename
        if not name.startswith(PRODUCT):
            return NEW[self._kind]()
        return OrderedLock(self._kind, f"{Path(name).relative_to(ROOT)}:{frame.f_lineno} {via}".strip(), self._order)


ORDER = LockOrder()


def pytest_configure() -> None:
    for kind in NEW:
        setattr(threading, kind, _Maker(kind, ORDER))


def pytest_sessionfinish(session) -> None:
    if ORDER.circles:
        print(f"\nlocks are taken in {len(ORDER.circles)} circles:\n\n" + "\n\n".join(ORDER.circles))
        session.exitstatus = 1
