"""REMOTE -> DISK: fetch files into the node's disk cache, beside the loader's thread."""

from __future__ import annotations

import threading
from collections.abc import Callable

from lora_server.errors import AdapterSourceError, LoraServerError
from lora_server.memory.entry import AdapterEntry, Source
from lora_server.sources.cache import Lease
from lora_server.sources.fetch import NODE0, Fetcher

MOST_AT_ONCE = 4

Fetched = Callable[[AdapterEntry, Lease | None, LoraServerError | None], None]


class RemoteFiles:
    """Files that are, or are not yet, in the node's disk cache. The store's lock guards it.

    `fetched` is called from a fetch's thread, with a lease or an error.
    """

    def __init__(self, fetcher: Fetcher | None, fetched: Fetched, is_cancelled: Callable[[AdapterEntry], bool]) -> None:
        self._fetcher, self._fetched, self._is_cancelled = fetcher, fetched, is_cancelled
        self._under_way: set[AdapterEntry] = set()
        self._on_disk: frozenset[str] = frozenset()  # versions
        self._unneeded: set[str] = set()  # versions that node 0 sent for entries that were dropped

    def lacks(self, source: Source) -> bool:
        """Return whether the disk cache lacks the files, as far as this shard knows."""
        return bool(source.remote) and source.version not in self._on_disk

    def note_disk(self, versions: frozenset[str]) -> frozenset[str]:
        """Note which versions the disk cache has; returns those that came or went."""
        before, self._on_disk = self._on_disk, versions
        return before ^ versions

    def fetch(self, entry: AdapterEntry) -> None:
        """Start to fetch, unless that is under way, or MOST_AT_ONCE others are."""
        if entry in self._under_way or len(self._under_way) >= MOST_AT_ONCE:
            return
        self._under_way.add(entry)
        threading.Thread(target=self._run, args=(entry,), daemon=True, name="fetch").start()

    def finish(self, entry: AdapterEntry, fetched: bool) -> None:
        """Account for the end of a fetch."""
        self._under_way.discard(entry)
        if fetched:
            self._on_disk |= {entry.source.version}

    def drop(self, source: Source) -> None:
        """Note that a dropped entry does not need its files."""
        if source.remote.startswith(NODE0):
            self._unneeded.add(source.version)

    def take_unneeded(self) -> set[str]:
        """Return the versions that were noted by `drop` since the last call."""
        unneeded, self._unneeded = self._unneeded, set()
        return unneeded

    def _run(self, entry: AdapterEntry) -> None:
        url, version = entry.source.remote, entry.source.version
        try:
            if self._fetcher is None:
                raise AdapterSourceError(f"adapter source {url}: this shard has no disk cache")
            lease = self._fetcher.fetch(url, version, cancelled=lambda: self._is_cancelled(entry))
        except LoraServerError as error:
            self._fetched(entry, None, error)
        else:
            self._fetched(entry, lease, None)
