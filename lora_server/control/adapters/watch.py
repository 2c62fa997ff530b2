"""Follows a directory of adapters while the server runs (`--watch`): see `directory`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import structlog

from lora_server.adapters import Scan, scan
from lora_server.control.adapters.directory import DirectorySource
from lora_server.control.start import StartState
from lora_server.errors import ServerUnavailableError, ShardUnavailableError
from lora_server.timings import DEFAULTS, Timings

IDLE_SHARE = 9  # after a scan the watch pauses for so many times as long as that took
GONE = ""  # the stamp of what is not there
log = structlog.get_logger()


class Sighting(NamedTuple):
    """The content under a name, and since when it is the same."""

    stamp: str
    since: float


def observe(seen: Mapping[str, Sighting], found: Scan, judged: Mapping[str, str], now: float) -> dict[str, Sighting]:
    """Return what is there now. A directory without an adapter's files is one only where the name is known."""
    stamps = dict.fromkeys([*seen, *judged], GONE) | found.adapters
    stamps |= {name: stamp for name, stamp in found.others.items() if name in judged}
    same = {name: seen[name] for name, stamp in stamps.items() if name in seen and seen[name].stamp == stamp}
    kept = {name: Sighting(stamp, now) for name, stamp in stamps.items() if stamp != GONE or name in judged}
    return kept | {name: one for name, one in same.items() if name in kept}


def decide(
    seen: Mapping[str, Sighting], judged: Mapping[str, str], now: float, settle_seconds: float
) -> tuple[list[str], list[str]]:
    """Return the names to load, because their settled content was not judged yet, and the names to forget."""
    settled = {name: one.stamp for name, one in seen.items() if now - one.since >= settle_seconds}
    take = sorted(name for name, stamp in settled.items() if stamp != GONE and judged.get(name) != stamp)
    return take, sorted(name for name in judged if settled.get(name) == GONE)


class DirectoryWatch:
    """Decides by polling what of a directory is taken, and what is forgotten. One thread calls it."""

    def __init__(
        self,
        source: DirectorySource,
        start: StartState,
        directory: Path,
        stopping: threading.Event,
        timings: Timings = DEFAULTS,
    ) -> None:
        self._source, self._start, self._directory = source, start, directory.absolute()
        self._stopping, self._timings = stopping, timings
        self._seen: dict[str, Sighting] = {}
        self._began: float | None = None
        self._identity: tuple[int, int] | None = None
        self._lost = ""  # why the directory cannot be read; logged when it begins and ends
        self._logged = "", frozenset[str]()  # why adapters are not taken yet, names that are not UTF-8

    def run(self, done: Callable[[], bool]) -> None:
        """Poll until `done()`, or `stopping`."""
        pause = 0.0
        while not done() and not self._stopping.wait(pause):
            began = time.monotonic()
            try:
                self.poll(began)
            except Exception:
                log.exception("a scan of the followed directory failed; trying again")
            pause = max(self._timings.watch_poll, IDLE_SHARE * (time.monotonic() - began))

    def poll(self, now: float) -> None:
        """Look once, and do what follows from it. Sets `registered` when all that lay there at the start was taken or
        refused."""
        judged, settle = self._source.judged(self._directory), self._timings.watch_settle
        found = self._look(bool(judged))
        if found is None:
            return
        self._began = now if self._began is None else self._began
        waited, unnamed = self._logged
        for name in sorted(found.unnamed - unnamed):
            log.warning("a directory is skipped: its name is not UTF-8; rename it", name=name)
        self._seen = observe(self._seen, found, judged, now)
        take, gone = decide(self._seen, judged, now, settle)
        if gone:
            self._source.forget(self._directory, gone)
        waits = ""
        with self._source.together():
            for name in take:
                if self._stopping.is_set():
                    return
                waits = self._take(name) or waits
        if take or gone:
            self._source.keep()
        if waits and waits != waited:
            log.warning("adapters of the followed directory are not loaded yet; trying again", reason=waits)
        self._logged = waits, found.unnamed
        if not waits and now - self._began >= settle:
            self._start.registered.set()

    def _take(self, name: str) -> str:
        """Return why it has to be tried again, or an empty text."""
        try:
            self._source.take(name, self._directory / name, self._seen[name].stamp)
        except (ServerUnavailableError, ShardUnavailableError) as error:
            return str(error)
        return ""

    def _look(self, had_some: bool) -> Scan | None:
        """Return what lies there, None where the directory is not what it was."""
        try:
            found, lost = scan(self._directory), ""
        except OSError as error:
            found, lost = None, f"{error.strerror}: {error.filename}"
        if found is not None and had_some and not found.adapters and found.identity != self._identity:
            found, lost = None, "it is empty, and another than before: was something unmounted?"
        if lost and not self._lost:
            do = "all adapters serve on; to drop them use lora-server adapters remove"
            log.error("the followed directory is lost", directory=str(self._directory), reason=lost, do=do)
        if self._lost and not lost:
            log.info("the followed directory is back", directory=str(self._directory))
        self._lost = lost
        if found is not None:
            self._identity = found.identity
        return found
