"""Fetch adapters into the disk cache: once per node, and completely checked before any process may use them."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol, TypeAlias

import structlog

from lora_server.adapters import AdapterLimits, open_adapter, validate_adapter
from lora_server.errors import AdapterError, AdapterFormatError, AdapterSourceError
from lora_server.sources.cache import Claim, DiskCache, Lease
from lora_server.sources.remote import RemoteAdapter, patiently
from lora_server.spec import ModelSpec

NODE0 = "node0://"  # before a path of node 0, for shards of other nodes
FETCH_SECONDS = 600.0
ROOM_SECONDS, ROOM_PAUSE = 30.0, 0.05  # while all cached adapters are in use
log = structlog.get_logger()


@dataclass
class FetchCounters:
    """Counters of one process since its start."""

    fetches: int = 0
    fetched_bytes: int = 0
    fetch_seconds: float = 0.0
    fetch_failures: int = 0


class DiskUse(NamedTuple):
    """Bytes of the disk cache, and counters of this process."""

    bytes: int
    total_bytes: int
    fetches: int
    fetched_bytes: int
    fetch_seconds: float
    fetch_failures: int
    evictions: int


class FileSource(Protocol):
    """Source of one adapter's files; `check` is called often, and may raise."""

    def sizes(self, check: Callable[[], None]) -> dict[str, int]:
        """Return the sizes of the files by name, in bytes."""
        ...

    def get(self, name: str, target: Path, size: int, check: Callable[[], None]) -> None:
        """Copy one file."""
        ...


FromNode0: TypeAlias = Callable[[str], AbstractContextManager[FileSource]]


def never() -> bool:
    """Cancel no fetch."""
    return False


@dataclass
class Fetcher:
    """Thread-safe. `from_node0`: opens a version's files on node 0; `listed`: --allow-source, for redirects."""

    cache: DiskCache
    spec: ModelSpec
    from_node0: FromNode0 | None = None
    listed: Sequence[str] = ()
    counters: FetchCounters = field(default_factory=FetchCounters)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def fetch(
        self,
        url: str,
        version: str = "",
        seconds: float = FETCH_SECONDS,
        cancelled: Callable[[], bool] = never,
        listed: Sequence[str] = (),
    ) -> Lease:
        """Lease the files of `version` ("": whatever the source has now), from the cache where it has them. `listed`: a
        narrower list for redirects than the fetcher's own.

        Raises AdapterSourceError where they are not fetched within `seconds` or have other content, AdapterFormatError
        where they cannot be served.
        """
        began = time.monotonic()
        try:
            lease = self._cached(version) if version else None
            if lease is None:
                lease, nbytes = self._fetch(url, version, began + seconds, cancelled, listed or self.listed)
                self._count(nbytes, time.monotonic() - began)
        except Exception as error:
            with self._lock:
                self.counters.fetch_failures += 1
            if isinstance(error, AdapterError):
                prefix = f"adapter source {url}: "
                raise type(error)(str(error) if url in str(error) else prefix + str(error)) from error
            raise AdapterSourceError(f"adapter source {url}: cannot be fetched: {_reason(error)}") from error
        return lease

    def use(self) -> DiskUse:
        """Return what metrics report."""
        nbytes, total_bytes, evictions = self.cache.nbytes(), self.cache.capacity, self.cache.evictions
        return DiskUse(bytes=nbytes, total_bytes=total_bytes, evictions=evictions, **vars(self.counters))

    def _count(self, nbytes: int, seconds: float) -> None:
        with self._lock:
            self.counters.fetches += bool(nbytes)
            self.counters.fetched_bytes += nbytes
            self.counters.fetch_seconds += seconds if nbytes else 0.0

    def _cached(self, version: str) -> Lease | None:
        """Lease a version from the cache. Files that were touched are checked again, and discarded if they changed."""
        lease = self.cache.take(version)
        if lease is None:
            return None
        if _is_intact(lease, self.spec):
            return lease
        log.error("files of the disk cache were changed; fetching them again", directory=str(lease.path))
        lease.close()
        self.cache.discard(version)
        return None

    def _fetch(
        self, url: str, version: str, deadline: float, cancelled: Callable[[], bool], listed: Sequence[str]
    ) -> tuple[Lease, int]:
        """Return the lease and the bytes that were fetched; 0 where another process has fetched them meanwhile."""

        def check() -> None:
            if cancelled() or time.monotonic() > deadline:
                raise AdapterSourceError("the request was cancelled" if cancelled() else "not fetched in time")

        with self._files(url, version, listed) as files:
            return self._copy(files, url, version, deadline, check)

    def _copy(
        self, files: FileSource, url: str, version: str, deadline: float, check: Callable[[], None]
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

    def _files(self, url: str, version: str, listed: Sequence[str]) -> AbstractContextManager[FileSource]:
        if url.startswith(NODE0) and self.from_node0 is not None:
            return self.from_node0(version)
        return RemoteAdapter(url, AdapterLimits.of(self.spec), listed)

    def _claim(self, version: str, nbytes: int, check: Callable[[], None]) -> Claim | Lease:
        """Reserve a directory, or wait for another process that fetches this version."""
        until = time.monotonic() + ROOM_SECONDS
        while (claim := self.cache.claim(version, nbytes)) is None:
            lease = self._cached(version) if version else None
            if lease is not None:
                return lease
            if time.monotonic() > until and not self.cache.is_fetching(version):
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


def _reason(error: Exception) -> str:
    """Return a library's message on one line; of an HTTP error only the status, since aiohttp may quote the body."""
    if isinstance(status := getattr(error, "status", None), int):
        return f"{type(error).__name__}: status {status}"
    return f"{type(error).__name__}: {' '.join(str(error).split())[:500]}".removesuffix(": ")
