"""One version of an adapter, as the controller, its ledger and its shards keep it."""

from __future__ import annotations

import re
import sys
import time
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import msgspec

from lora_server.adapters import Adapter
from lora_server.adapters.refusal import shown
from lora_server.errors import AdapterFormatError
from lora_server.registry.versions import Version
from lora_server.sources.urls import is_remote
from lora_server.spec import PROJECTIONS, Invocation, Site

FIRST_HANDLE = (1 << 16) + 1  # a shard's kernel takes one as 16 bits of index, and a generation from 1 on
# names stand in URLs, logs and metrics: nothing that only looks like another, and no steps of a path
_NAME = re.compile(r"(?=.{1,200}$)[A-Za-z0-9_][A-Za-z0-9._@:+-]*(?:/(?!\.{1,2}(?:/|$))[A-Za-z0-9._@:+-]+)*", re.DOTALL)
_VERSION = re.compile(r"(.+)@([0-9a-f]{64})", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Record:
    """One registered version of an adapter; `stamp` tells whether its files were touched since.

    `path` is what shards read; `uri` is where it was found, which may be a link to it. `found` is the stamp of
    what lay there (adapters/scan.py), empty for a directory that is not followed. `pinned`: it is never evicted.
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
    slo_class: str = ""  # that it was given by name
    outline: str = ""  # digest of where its matrices lie; empty if it is from far, and in an older ledger

    @cached_property
    def site_codes(self) -> tuple[int, ...]:
        """The sites as a client is told of them, see HeldAdapter of the proto."""
        return tuple(site.layer * len(PROJECTIONS) + PROJECTIONS.index(site.projection) for site in self.sites)

    def encode(self) -> bytes:
        """Serialize it, for a shard or the ledger to keep."""
        return msgspec.json.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> Record:
        """Read what `encode` wrote."""
        record = msgspec.json.decode(data, type=cls)
        return replace(record, sites=_shared(record.sites), outline=sys.intern(record.outline))


@lru_cache(maxsize=1024)
def _shared(sites: tuple[Site, ...]) -> tuple[Site, ...]:
    """Return one tuple for all adapters of the same sites: a hundred thousand have a few."""
    return sites


def version_of(record: Record) -> Version:
    """Return the ledger's row of a version that is added now."""
    text = record.encode().decode()
    return Version(record.handle, record.name, record.version, True, record.pinned, time.time(), text)


def record_of(kept: Version) -> Record:
    """Return the version of a row of the ledger."""
    return replace(Record.decode(kept.record.encode()), pinned=kept.pinned)


def check_name(name: str) -> str:
    """Return the name. Raises AdapterFormatError for one that is not allowed."""
    if not _NAME.fullmatch(name):
        raise AdapterFormatError(
            f"adapter name: got {shown(name)}, expected 1 to 200 letters and digits (ASCII) or any of . _ - / @ : +, "
            "starting with a letter, digit or _, and no part between slashes that is empty, . or .."
        )
    return name


def split_version(name: str) -> tuple[str, str]:
    """Split NAME@DIGEST, by which a client names one version of an adapter; the digest is empty without one."""
    found = _VERSION.fullmatch(name)
    return (found[1], found[2]) if found else (name, "")


def draft(name: str, adapter: Adapter, version: str, uri: str, path: str, stamp: str) -> Record:
    """Return the record of an adapter that was validated; it has no handle yet."""
    return Record(
        handle=0,
        name=name,
        version=version,
        path=path,
        stamp=stamp,
        lora_rank=adapter.lora_rank,
        nbytes=adapter.nbytes,
        sites=_shared(tuple(adapter.sites())),
        warnings=adapter.warnings,
        invocation=adapter.invocation,
        uri=uri,
        outline="" if is_remote(path) else sys.intern(adapter.outline.key.hex()),
    )


def described(record: Record) -> dict[str, object]:
    """Return what a line of the log says of a version."""
    return {
        "name": record.name,
        "version": record.version[:12],
        "lora_rank": record.lora_rank,
        "bytes": record.nbytes,
    }
