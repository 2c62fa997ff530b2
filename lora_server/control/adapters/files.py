"""Locations of adapters' files: a directory of this host, a URL that the disk cache fetches, the server's own copy."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from urllib.parse import unquote, urlsplit

import structlog

from lora_server.adapters import open_adapter, validate_adapter
from lora_server.adapters.refusal import shown
from lora_server.adapters.scan import escaped, is_text
from lora_server.control.adapters.catalog import AdapterCatalog
from lora_server.control.adapters.records import Record, draft
from lora_server.control.caller import has_left
from lora_server.errors import AdapterError, AdapterSourceError
from lora_server.sources.copies import Copies
from lora_server.sources.fetch import Fetcher
from lora_server.sources.urls import canonical, is_remote
from lora_server.spec import ModelSpec

log = structlog.get_logger()


class AdapterFiles:
    """Opens adapters' files, and keeps the server's own copies. Thread-safe, but `tidy` is for one thread."""

    def __init__(
        self, spec: ModelSpec, catalog: AdapterCatalog, fetcher: Fetcher | None = None, copies: Copies | None = None
    ) -> None:
        """`fetcher` fetches remote adapters; `copies` has the server's own copy of each that was added by name."""
        self.spec, self._catalog, self.fetcher, self._copies = spec, catalog, fetcher, copies
        self._tidied: set[int] | None = None  # handles when copies were last tidied; None: some may be left over

    @contextlib.contextmanager
    def open(self, name: str, uri: str, seconds: float, listed: Sequence[str] = ()) -> Iterator[Record]:
        """Validate what lies at `uri`, reading all of it, and yield it as a record without a handle.

        Remote files are fetched within `seconds`, while the caller waits, with redirects below `listed`; those of this
        host are copied, since others may change them. Raises AdapterError, OSError.
        """
        with opened(name, uri, self.spec, self.fetcher, seconds, listed) as found:
            served = self._catalog.find(name)
            known = served is not None and served.version == found.version
            if self._copies is None or known or is_remote(found.path):
                yield found
                return
            path, stamp = self._copies.take(Path(found.path), found.version)
            try:
                yield replace(found, path=str(path), stamp=stamp)
            finally:
                self._copies.done(found.version)
                self._tidied = None  # unless it was listed

    def localized(self, record: Record) -> Record:
        """Return a version of the ledger with its files as this host has them; shards check that they are the same."""
        copy = self._copies.find(record.version) if self._copies is not None else None
        if is_remote(record.path) or copy is not None:
            return record if copy is None or str(copy) == record.path else replace(record, path=str(copy))
        return record if Path(record.path).exists() else replace(record, path=os.path.realpath(record.uri))

    def copy(self, record: Record) -> None:
        """Copy the files of another server's version, where they can be read."""
        record = self.localized(record)
        if self._copies is None or is_remote(record.path) or self._copies.find(record.version) is not None:
            return
        try:
            self._copies.take(Path(record.path), record.version)
            self._copies.done(record.version)
        except (AdapterError, OSError) as error:
            log.warning("no copy of another server's adapter", name=record.name, reason=str(error))

    def tidy(self) -> None:
        """Delete copies of versions that no name means or meant, and that no client holds."""
        stored = self._catalog.ledger.stored
        if self._copies is None or stored is None or not self._catalog.start.settled.is_set():
            return
        if (handles := {one.handle for one in self._catalog.records()}) == self._tidied:
            return
        self._tidied = handles
        kept = {one.version for one in stored.all()} | {one.version for one in self._catalog.records()}
        self._copies.keep(kept)


@contextlib.contextmanager
def opened(
    name: str, uri: str, spec: ModelSpec, fetcher: Fetcher | None, seconds: float, listed: Sequence[str] = ()
) -> Iterator[Record]:
    """Validate and yield what lies at `uri`, see AdapterFiles.open. Raises AdapterError."""
    if not is_remote(uri):
        where = local_path(uri)
        adapter, version = validate_adapter(real_path(where), spec)
        with adapter:
            yield draft(name, adapter, version, uri_of(where), str(adapter.path), adapter.stamp)
        return
    url = canonical(uri)
    if fetcher is None:
        raise AdapterSourceError(f"adapter source {url}: this controller has no disk cache, expected file:// or a path")
    with (
        fetcher.fetch(url, seconds=seconds, cancelled=has_left, listed=listed) as lease,
        open_adapter(lease.path, spec) as adapter,
    ):
        yield draft(name, adapter, lease.version, url, url, "")


def local_path(uri: str) -> Path:
    """Return the directory, or link to one, that a path or a file:// URL names. Raises AdapterSourceError."""
    try:
        path = unquote(urlsplit(uri).path) if uri.lower().startswith("file://") else uri
    except ValueError:
        path = ""
    if not path or "\0" in path:
        raise AdapterSourceError(f"adapter source: got {shown(uri)}, expected a path, file:///PATH, or a URL")
    return Path(path).absolute()


def real_path(where: Path) -> Path:
    """Follow links. Raises AdapterSourceError for a path that is not UTF-8, which no message can carry."""
    path = os.path.realpath(where)
    if not is_text(path):
        raise AdapterSourceError(
            f"adapter source {escaped(str(where))}: leads to {escaped(path)}, expected a path of UTF-8; rename it there"
        )
    return Path(path)


def uri_of(where: Path) -> str:
    """Return the normalised path, so that one place has one text. A link as its last part is not followed."""
    return os.path.normpath(where)
