"""From a URL into the disk cache: once per node, checked to the last number before anybody may use it."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol, TypeAlias

import structlog

from lora_server.adapters import Limits, open_adapter, validate_adapter
from lora_server.errors import AdapterError, AdapterFormatError, AdapterSourceError
from lora_server.sources.cache import Claim, DiskCache, Lease
from lora_server.sources.remote import RemoteAdapter
from lora_server.sources.retries import patiently
from lora_server.spec import ModelSpec

NODE0 = "node0://"  # and a path there: begins what is no URL, for shards of other nodes
FETCH_SECONDS = 600.0
ROOM_SECONDS, ROOM_PAUSE = 30.0, 0.05  # while all that is there is in use
log = structlog.get_logger()


@dataclass
class FetchCounters:
    """Of one process, since its start."""

    fetches: int = 0
    fetched_bytes: int = 0
    seconds: float = 0.0
    failures: int = 0


class DiskUse(NamedTuple):
    """What the disk cache holds and may hold, and what this process did to it."""

    bytes: int
    total_bytes: int
    fetches: int
    fetched_bytes: int
    fetch_seconds: float
    fetch_failures: int
    evictions: int


class AdapterFiles(Protocol):
    """Of one adapter, wherever they are; `check` is called again and again, and may raise."""

    def sizes(self, check: Callable[[], None]) -> dict[str, int]:
        """By name, in bytes."""
        ...

    def get(self, name: str, target: Path, size: int, check: Callable[[], None]) -> None:
        """Copy one."""
        ...


FromNode0: TypeAlias = Callable[[str], AbstractContextManager[AdapterFiles]]


def never() -> bool:
    """Nobody cancels it."""
    return False


@dataclass
class Fetcher:
    """Thread-safe. `from_node0`: the files of a version there."""

    cache: DiskCache
    spec: ModelSpec
    from_node0: FromNode0 | None = None
    counters: FetchCounters = field(default_factory=FetchCounters)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def fetch(
        self, url: str, version: str = "", seconds: float = FETCH_SECONDS, cancelled: Callable[[], bool] = never
    ) -> Lease:
        """The files of `version`, or of what is there now; from the cache where it has them.

        Raises AdapterSourceError where they do not come within `seconds` or have another content, AdapterFormatError
        where they cannot be served.
        """
        began = time.monotonic()
        try:
            lease = self._kept(version) if version else None
            if lease is None:
                lease, nbytes = self._fetch(url, version, began + seconds, cancelled)
                self._count(nbytes, time.monotonic() - began)
        except Exception as error:
            with self._lock:
                self.counters.failures += 1
            if isinstance(error, AdapterError):
                prefix = f"adapter source {url}: "
                raise type(error)(str(error) if url in str(error) else prefix + str(error)) from error
            raise AdapterSourceError(f"adapter source {url}: cannot be fetched: {_told(error)}") from error
        return lease

    def use(self) -> DiskUse:
        """For metrics."""
        counters, cache = self.counters, self.cache
        return DiskUse(
            cache.nbytes(),
            cache.capacity,
            counters.fetches,
            counters.fetched_bytes,
            counters.seconds,
            counters.failures,
            cache.evictions,
        )

    def _count(self, nbytes: int, seconds: float) -> None:
        with self._lock:
            self.counters.fetches += bool(nbytes)
            self.counters.fetched_bytes += nbytes
            self.counters.seconds += seconds if nbytes else 0.0

    def _kept(self, version: str) -> Lease | None:
        """What the cache has; files that were touched since must have the same content still."""
        lease = self.cache.take(version)
        if lease is None:
            return None
        if _is_intact(lease, self.spec):
            return lease
        log.error("files of the disk cache were changed; fetching them again", directory=str(lease.path))
        lease.close()
        self.cache.discard(version)
        return None

    def _fetch(self, url: str, version: str, deadline: float, cancelled: Callable[[], bool]) -> tuple[Lease, int]:
        """Also how many bytes came; 0 where another process has brought them meanwhile."""

        def check() -> None:
            if cancelled() or time.monotonic() > deadline:
                raise AdapterSourceError("not wanted any more" if cancelled() else "not fetched within its time")

        with self._files(url, version) as files:
            return self._bring(files, url, version, deadline, check)

    def _bring(
        self, files: AdapterFiles, url: str, version: str, deadline: float, check: Callable[[], None]
    ) -> tuple[Lease, int]:
        sizes = patiently(functools.partial(files.sizes, check), deadline)
        claim = self._claim(version, sum(sizes.values()), check)
        if isinstance(claim, Lease):
            return claim, 0
        try:
            for name, nbytes in sizes.items():
                patiently(functools.partial(files.get, name, claim.path / name, nbytes, check), deadline)
            stamp, found = self._validate(claim, url)
            if version and found != version:
                raise AdapterSourceError(
                    f"its content changed since it was registered: got version {found[:12]}, expected "
                    f"{version[:12]}; remove it and add it again, or put back what was there"
                )
            return self.cache.keep(claim, found, stamp), claim.nbytes
        except BaseException:
            self.cache.abandon(claim)
            raise

    def _files(self, url: str, version: str) -> AbstractContextManager[AdapterFiles]:
        if url.startswith(NODE0) and self.from_node0 is not None:
            return self.from_node0(version)
        return nullcontext(RemoteAdapter(url, Limits.of(self.spec)))

    def _claim(self, version: str, nbytes: int, check: Callable[[], None]) -> Claim | Lease:
        """A place for it; what another process brings is waited for."""
        until = time.monotonic() + ROOM_SECONDS
        while (claim := self.cache.claim(version, nbytes)) is None:
            lease = self._kept(version) if version else None
            if lease is not None:
                return lease
            if time.monotonic() > until and not self.cache.is_coming(version):
                raise AdapterSourceError(
                    f"there is no room for its {nbytes} bytes: the disk is full, or all of {self.cache.directory} is "
                    "in use; give it more with --disk-cache-size, or another disk with --disk-cache"
                )
            check()
            time.sleep(ROOM_PAUSE)
        return claim

    def _validate(self, claim: Claim, url: str) -> tuple[str, str]:
        try:
            adapter, version = validate_adapter(claim.path, self.spec)
        except AdapterFormatError as error:
            raise AdapterFormatError(str(error).replace(str(claim.path), url)) from None
        with adapter:
            return adapter.stamp, version


def _is_intact(lease: Lease, spec: ModelSpec) -> bool:
    try:
        with open_adapter(lease.path, spec) as adapter:
            return adapter.stamp == lease.stamp or adapter.version() == lease.version
    except AdapterFormatError:
        return False


def _told(error: Exception) -> str:
    """What libraries say, on one line; some say nothing but their name."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:500]}".removesuffix(": ")
