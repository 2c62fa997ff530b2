"""REMOTE -> DISK, beside the loader's thread: a few fetches at a time, of those that are needed first."""

from __future__ import annotations

import threading
from collections.abc import Callable

from lora_server.errors import AdapterSourceError, LoraServerError
from lora_server.memory.entry import Entry
from lora_server.sources.cache import Lease
from lora_server.sources.fetch import Fetcher

MOST_AT_ONCE = 4

Fetched = Callable[[Entry, Lease | None, LoraServerError | None], None]


class Fetching:
    """Not thread-safe: under the store's lock. `fetched` is called from another thread, with a lease or why not."""

    def __init__(self, fetcher: Fetcher | None, fetched: Fetched, cancelled: Callable[[], bool]) -> None:
        self._fetcher, self._fetched, self._cancelled = fetcher, fetched, cancelled
        self._under_way: set[Entry] = set()

    def start(self, entry: Entry) -> None:
        """Unless it is under way, or too many others are."""
        if entry in self._under_way or len(self._under_way) >= MOST_AT_ONCE:
            return
        self._under_way.add(entry)
        threading.Thread(target=self._run, args=(entry,), daemon=True, name="fetch").start()

    def finish(self, entry: Entry) -> None:
        """`fetched` has been told."""
        self._under_way.discard(entry)

    def _run(self, entry: Entry) -> None:
        url, version = entry.source.remote, entry.source.version
        try:
            if self._fetcher is None:
                raise AdapterSourceError(f"adapter source {url}: this shard has no disk cache")
            lease = self._fetcher.fetch(url, version, cancelled=self._is_unwanted(entry))
        except LoraServerError as error:
            self._fetched(entry, None, error)
        else:
            self._fetched(entry, lease, None)

    def _is_unwanted(self, entry: Entry) -> Callable[[], bool]:
        return lambda: entry.dropped or self._cancelled()
