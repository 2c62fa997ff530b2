"""Which adapters there are, who holds them, and what each shard has of them. In memory; not durable.

Not thread-safe: the controller calls it under its lock.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field

from lora_server.errors import AdapterExistsError, AdapterFormatError, AdapterLoadError, UnknownAdapterError
from lora_server.spec import Invocation, Site

_NAME = re.compile(r"[\w][\w./@:+-]{0,199}")


@dataclass(kw_only=True)
class Record:
    """One registered version of an adapter; `stamp` tells whether its files were touched since."""

    name: str
    version: str
    path: str
    stamp: str
    lora_rank: int
    nbytes: int
    sites: tuple[Site, ...]
    warnings: tuple[str, ...]
    invocation: Invocation | None = None
    handle: int = 0
    listed: bool = True
    error: str = ""
    holders: Counter[int] = field(default_factory=Counter)  # client -> times acquired
    layers: dict[int, int] = field(default_factory=dict)  # shard -> layers it has ready
    loaded: set[int] = field(default_factory=set)  # shards that have all of theirs

    def state(self, num_shards: int) -> str:
        """In one word."""
        if not self.listed:
            return "draining"
        if self.error:
            return "failed"
        return "ready" if len(self.loaded) == num_shards else "loading"


def check_name(name: str) -> str:
    """Raises AdapterFormatError for a name that cannot be one."""
    if not _NAME.fullmatch(name):
        raise AdapterFormatError(
            f"adapter name: got {name!r}, expected 1 to 200 letters, digits or any of . _ - / @ : +, "
            "starting with a letter, digit or _"
        )
    return name


class Registry:
    """Handles are never used twice, so a late step of a removed adapter meets nobody else's weights."""

    def __init__(self) -> None:
        self._by_name: dict[str, Record] = {}
        self._by_handle: dict[int, Record] = {}
        self._next_handle = 1
        self.refused: dict[str, str] = {}  # of the start-up directory: name -> why

    def existing(self, name: str, version: str) -> Record | None:
        """The listed record of that name; raises AdapterExistsError if its content is another."""
        record = self._by_name.get(name)
        if record is not None and record.version != version:
            raise AdapterExistsError(
                f"adapter {name!r}: version {record.version[:12]} is served under this name, got {version[:12]}; "
                "remove it first, or take another name"
            )
        return record

    def add(self, record: Record) -> Record:
        """List a record under a handle of its own."""
        record.handle = self._next_handle
        self._next_handle += 1
        self.refused.pop(record.name, None)
        self._by_name[record.name] = record
        self._by_handle[record.handle] = record
        return record

    def get(self, name: str) -> Record:
        """A listed adapter; raises UnknownAdapterError."""
        record = self._by_name.get(name)
        if record is None and name in self.refused:
            raise UnknownAdapterError(f"adapter {name!r}: refused when the server started: {self.refused[name]}")
        if record is None:
            known = ", ".join(sorted(self._by_name)[:8]) or "none"
            raise UnknownAdapterError(f"adapter {name!r}: not registered here (known: {known}); add it first")
        return record

    def by_handle(self, handle: int) -> Record | None:
        """Any record that still exists, listed or draining."""
        return self._by_handle.get(handle)

    def records(self) -> list[Record]:
        """All that exist, by handle."""
        return list(self._by_handle.values())

    def acquire(self, client: int, names: list[str]) -> list[Record]:
        """Hold all of `names`, or none; raises UnknownAdapterError, or why one failed to load."""
        records = [self.get(name) for name in names]
        for record in records:
            if record.error:
                raise AdapterLoadError(f"adapter {record.name!r}: {record.error}")
        for record in records:
            record.holders[client] += 1
        return records

    def release(self, client: int, handles: list[int]) -> list[int]:
        """Let go; returns the handles that nobody needs any more."""
        for handle in handles:
            record = self._by_handle.get(handle)
            if record is not None and record.holders[client] > 0:
                record.holders[client] -= 1
        return self._collect()

    def forget_client(self, client: int) -> list[int]:
        """A client is gone; returns the handles that nobody needs any more."""
        for record in self._by_handle.values():
            record.holders.pop(client, None)
        return self._collect()

    def unlist(self, name: str) -> tuple[Record, list[int]]:
        """Stop offering a name; returns its record and the handles that nobody needs any more."""
        record = self.get(name)
        record.listed = False
        del self._by_name[name]
        return record, self._collect()

    def _collect(self) -> list[int]:
        free = [r.handle for r in self._by_handle.values() if not r.listed and not +r.holders]
        for handle in free:
            del self._by_handle[handle]
        return free
