"""Which adapters there are, as their controller knows it. The ledger keeps those that were added by name for good
(lora_server/registry/versions.py); shards keep what each was told, for the next controller.

Not thread-safe: `adapters` calls it under its lock.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import msgspec

from lora_server.adapters.refusal import shown
from lora_server.control.adapters.refusals import REMOVED, Refusals
from lora_server.errors import AdapterExistsError, AdapterFormatError, UnknownAdapterError
from lora_server.registry.versions import Version
from lora_server.spec import Invocation, Site

FIRST_HANDLE = (1 << 16) + 1  # a shard's kernel takes one as 16 bits of index, and a generation from 1 on
# names stand in URLs, logs and metrics: nothing that only looks like another, and no steps of a path
_NAME = re.compile(r"(?=.{1,200}$)[A-Za-z0-9_][A-Za-z0-9._@:+-]*(?:/(?!\.{1,2}(?:/|$))[A-Za-z0-9._@:+-]+)*", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Record:
    """One registered version of an adapter; `stamp` tells whether its files were touched since.

    `path` is what shards read; `uri` is where it was found, which may be a link to it. `found` is the stamp of
    what lay there (adapters/scan.py), empty where nobody follows it. `pinned`: it never makes room for others.
    `of_directory`: it is one of --adapters, and not in the ledger.
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
    of_directory: bool = False

    def encode(self) -> bytes:
        """For a shard to keep."""
        return msgspec.json.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> Record:
        """What `encode` made."""
        return msgspec.json.decode(data, type=cls)


def version_of(record: Record) -> Version:
    """As the ledger keeps it, added now."""
    text = record.encode().decode()
    return Version(record.handle, record.name, record.version, True, record.pinned, time.time(), text)


def record_of(kept: Version) -> Record:
    """What the ledger kept."""
    return replace(Record.decode(kept.record.encode()), pinned=kept.pinned)


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

    def __init__(self, take_handles: Callable[[int], range] | None = None) -> None:
        """`take_handles` gives some above a number that nobody ever had; without it only this registry counts."""
        self._by_name: dict[str, Record] = {}
        self._by_handle: dict[int, Record] = {}
        self._take_handles, self._handles, self._highest = take_handles, range(0), FIRST_HANDLE - 1
        self.refusals = Refusals()
        self.unlisted: set[int] = set()  # handles: what comes to replace another, and what drains
        self.pinned: set[int] = set()  # of the listed ones

    def next_handle(self) -> int:
        """One that nobody had."""
        self.prepare()
        self._highest, self._handles = self._handles[0], self._handles[1:]
        return self._highest

    def prepare(self) -> None:
        """Have a next handle; may ask the database, so that who has a lock that others wait for does it before."""
        self._handles = range(max(self._handles.start, self._highest + 1), self._handles.stop)
        if not self._handles:
            own = range(self._highest + 1, self._highest + 2)
            self._handles = self._take_handles(self._highest) if self._take_handles is not None else own

    def reserve(self, handle: int) -> None:
        """Handles up to this one were used by an earlier controller."""
        self._highest = max(self._highest, handle)

    def existing(self, name: str, version: str) -> Record | None:
        """The listed record of that name; raises AdapterExistsError if its content is another."""
        record = self._by_name.get(name)
        if record is not None and record.version != version:
            raise AdapterExistsError(
                f"adapter {name!r}: version {record.version[:12]} is served under this name, got {version[:12]}; "
                f"lora-server adapters update {name} SOURCE puts another in its place"
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

    def make_listed(self, record: Record) -> Record | None:
        """Its name means this record, whichever came later; what it meant instead, which drains."""
        other = self._by_name.get(record.name)
        self.reserve(record.handle)
        self._by_handle[record.handle] = self._by_name[record.name] = record
        replaced = other if other is not None and other.handle != record.handle else None
        for one in (record, replaced):
            if one is not None:
                self._sort(one)
        return replaced

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
