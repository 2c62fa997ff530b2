"""A directory of adapters that is followed while the server runs (`--watch`), by polling: it works on every volume.

An adapter is taken when its files were the same for `settle_seconds`, and a directory is gone when it was away for as
long: what is being copied, or put in another's place, is waited for. A directory that cannot be listed, or that is
empty and not the same as before (a mount went away), says nothing about its adapters: all serve on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import structlog

from lora_server.adapters import Scan, scan
from lora_server.control.adapters.followed import FollowedAdapters
from lora_server.errors import ServerUnavailableError, ShardUnavailableError
from lora_server.timings import Timings

IDLE_SHARE = 9  # a poll that takes long is rested from for so many times as long
GONE = ""  # the stamp of what is not there
log = structlog.get_logger()


class Seen(NamedTuple):
    """What lies under a name, and since when."""

    stamp: str
    since: float


def observe(seen: Mapping[str, Seen], found: Scan, judged: Mapping[str, str], now: float) -> dict[str, Seen]:
    """What is there now. A directory without an adapter's files is one only where the name is known."""
    stamps = dict.fromkeys([*seen, *judged], GONE) | found.adapters
    stamps |= {name: stamp for name, stamp in found.others.items() if name in judged}
    same = {name: seen[name] for name, stamp in stamps.items() if name in seen and seen[name].stamp == stamp}
    kept = {name: Seen(stamp, now) for name, stamp in stamps.items() if stamp != GONE or name in judged}
    return kept | {name: one for name, one in same.items() if name in kept}


def decide(
    seen: Mapping[str, Seen], judged: Mapping[str, str], now: float, settle_seconds: float
) -> tuple[list[str], list[str]]:
    """Names to take, because what lies there was not judged yet, and names to forget."""
    settled = {name: one.stamp for name, one in seen.items() if now - one.since >= settle_seconds}
    take = sorted(name for name, stamp in settled.items() if stamp != GONE and judged.get(name) != stamp)
    return take, sorted(name for name in judged if settled.get(name) == GONE)


class Watcher:
    """`first_done` is called once, when all that lay there at the start was taken or refused; not after a restart of
    the controller. One thread calls `run`, or a test `poll`.
    """

    def __init__(
        self,
        adapters: FollowedAdapters,
        directory: Path,
        stopping: threading.Event,
        first_done: Callable[[], None],
        settle_seconds: float = Timings.watch_settle,
        poll_seconds: float = Timings.watch_poll,
    ) -> None:
        self._adapters, self._directory = adapters, directory.absolute()
        self._stopping, self._first_done = stopping, first_done
        self._settle_seconds, self._poll_seconds = settle_seconds, poll_seconds
        self._seen: dict[str, Seen] = {}
        self._began: float | None = None
        self._identity: tuple[int, int] | None = None
        self._lost = self._waits = ""  # what was said last

    def run(self) -> None:
        """Until `stopping`."""
        pause = 0.0
        while not self._stopping.wait(pause):
            began = time.monotonic()
            try:
                self.poll(began)
            except Exception:
                log.exception("a look at the followed directory failed; it goes on")
            pause = max(self._poll_seconds, IDLE_SHARE * (time.monotonic() - began))

    def poll(self, now: float) -> None:
        """Look once, and do what follows from it."""
        judged = self._adapters.judged(self._directory)
        found = self._look(bool(judged))
        if found is None:
            return
        self._began = now if self._began is None else self._began
        self._seen = observe(self._seen, found, judged, now)
        take, gone = decide(self._seen, judged, now, self._settle_seconds)
        if gone:
            self._adapters.forget(self._directory, gone)
        waits = ""
        for name in take:
            if self._stopping.is_set():
                return
            waits = self._take(name) or waits
        if take or gone:
            self._adapters.tell_refused()
            self._adapters.keep_readings()
        if waits and waits != self._waits:
            log.warning("not taken from the followed directory yet; trying again", reason=waits)
        self._waits = waits
        if not waits and now - self._began >= self._settle_seconds and not self._adapters.registered.is_set():
            self._adapters.registered.set()
            self._first_done()

    def _take(self, name: str) -> str:
        """Why it has to be tried again, or empty."""
        try:
            self._adapters.follow(name, self._directory / name, self._seen[name].stamp)
        except (ServerUnavailableError, ShardUnavailableError) as error:
            return str(error)
        return ""

    def _look(self, had_some: bool) -> Scan | None:
        """None where the directory is not what it was."""
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
