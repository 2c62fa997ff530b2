"""Which adapters there are: what a restarted server has to know again. Shards keep it for their controller.

Not thread-safe: `adapters` calls it under its lock.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import msgspec

from lora_server.adapters.refusal import shown
from lora_server.control.refusals import REMOVED, Refusals
from lora_server.errors import AdapterExistsError, AdapterFormatError, UnknownAdapterError
from lora_server.spec import Invocation, Site

FIRST_HANDLE = (1 << 16) + 1  # a shard's kernel takes one as 16 bits of index, and a generation from 1 on
# names stand in URLs, logs and metrics: nothing that only looks like another, and no steps of a path
_NAME = re.compile(r"(?=.{1,200}$)[A-Za-z0-9_][A-Za-z0-9._@:+-]*(?:/(?!\.{1,2}(?:/|$))[A-Za-z0-9._@:+-]+)*", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Record:
    """One registered version of an adapter; `stamp` tells whether its files were touched since.

    `path` is what shards read; `uri` is where it was found, which may be a link to it. `found` is the stamp of
    what lay there (adapters/scan.py), empty where nobody follows it. `pinned`: it never makes room for others.
    """

    handle: int
    name: str
    version: str
    path: str
    stamp: str
    lora_rank: int
    nbytes: int
    sites: tuple[Site, ...]
    warnings: tuple[str, ...]
    invocation: Invocation | None = None
    uri: str = ""
    found: str = ""
    pinned: bool = False

    def encode(self) -> bytes:
        """For a shard to keep."""
        return msgspec.json.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> Record:
        """What `encode` made."""
        return msgspec.json.decode(data, type=cls)


def check_name(name: str) -> str:
    """Raises AdapterFormatError for a name that cannot be one."""
    if not _NAME.fullmatch(name):
        raise AdapterFormatError(
            f"adapter name: got {shown(name)}, expected 1 to 200 letters and digits (ASCII) or any of . _ - / @ : +, "
            "starting with a letter, digit or _, and no part between slashes that is empty, . or .."
        )
    return name


class Registry:
    """Handles are never used twice, so a late step of a removed adapter meets nobody else's weights."""

    def __init__(self) -> None:
        self._by_name: dict[str, Record] = {}
        self._by_handle: dict[int, Record] = {}
        self._next_handle = FIRST_HANDLE
        self.refusals = Refusals()
        self.unlisted: set[int] = set()  # handles: what comes to replace another, and what drains
        self.pinned: set[int] = set()  # of the listed ones

    def next_handle(self) -> int:
        """One that nobody had."""
        handle, self._next_handle = self._next_handle, self._next_handle + 1
        return handle

    def reserve(self, handle: int) -> None:
        """Handles up to this one were used by an earlier controller."""
        self._next_handle = max(self._next_handle, handle + 1)

    def existing(self, name: str, version: str) -> Record | None:
        """The listed record of that name; raises AdapterExistsError if its content is another."""
        record = self._by_name.get(name)
        if record is not None and record.version != version:
            raise AdapterExistsError(
                f"adapter {name!r}: version {record.version[:12]} is served under this name, got {version[:12]}; "
                "remove it first, or take another name"
            )
        return record

    def add(self, record: Record, listed: bool = True) -> None:
        """List a record, or, draining, only keep it. Of two under one name the one that came later is listed."""
        self.reserve(record.handle)
        self._by_handle[record.handle] = record
        other = self._by_name.get(record.name)
        if listed and (other is None or other.handle < record.handle):
            self._by_name[record.name] = record
        for one in (record, other):
            if one is not None:
                self._sort(one)

    def _sort(self, record: Record) -> None:
        listed, handle = self.is_listed(record), record.handle
        (self.unlisted.discard if listed else self.unlisted.add)(handle)
        (self.pinned.add if listed and record.pinned else self.pinned.discard)(handle)

    def update(self, record: Record) -> None:
        """The same version lies elsewhere now, its files were touched, or it was pinned or unpinned."""
        if self.is_listed(record):
            self._by_name[record.name] = record
        self._by_handle[record.handle] = record
        self._sort(record)

    def get(self, name: str) -> Record:
        """A listed adapter; raises UnknownAdapterError."""
        record, refusal = self._by_name.get(name), self.refusals.get(name)
        if record is None and refusal is not None:
            if refusal.code == REMOVED:
                raise UnknownAdapterError(f"adapter {name!r}: was removed; {refusal.reason}")
            raise UnknownAdapterError(f"adapter {name!r}: refused: {refusal.reason}")
        if record is None:
            known = ", ".join(sorted(self._by_name)[:8]) or "none"
            raise UnknownAdapterError(f"adapter {name!r}: not registered here (known: {known}); add it first")
        return record

    def is_listed(self, record: Record) -> bool:
        """Whether its name is offered; otherwise it drains."""
        listed = self._by_name.get(record.name)
        return listed is not None and listed.handle == record.handle

    def find(self, name: str) -> Record | None:
        """The listed record of that name."""
        return self._by_name.get(name)

    def by_handle(self, handle: int) -> Record | None:
        """Any record that still exists, listed or draining."""
        return self._by_handle.get(handle)

    def records(self) -> list[Record]:
        """All that exist, by handle."""
        return list(self._by_handle.values())

    def listed(self) -> list[Record]:
        """All whose names are offered."""
        return list(self._by_name.values())

    def unlist(self, name: str) -> Record:
        """Stop offering a name; raises UnknownAdapterError."""
        record = self.get(name)
        del self._by_name[name]
        self._sort(record)
        return record

    def remove(self, handle: int) -> None:
        """Forget a record, listed or not."""
        record = self._by_handle.pop(handle)
        if self.is_listed(record):
            del self._by_name[record.name]
        self.unlisted.discard(handle)
        self.pinned.discard(handle)
