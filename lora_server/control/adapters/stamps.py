"""Records of a directory's adapters with their files' stamps: a restart does not read untouched files again."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import structlog

from lora_server import __version__
from lora_server.control.adapters.files import real_path, uri_of
from lora_server.control.adapters.records import Record
from lora_server.errors import ServerUnavailableError
from lora_server.registry.versions import Ledger, Seen
from lora_server.spec import ModelSpec

log = structlog.get_logger()


class StampStore:
    """Stamps of a directory's files, for the next server. Not thread-safe."""

    def __init__(self, ledger: Ledger | None, spec: ModelSpec) -> None:
        self._ledger, self._reader = ledger, f"{__version__}/{hashlib.sha256(spec.to_json().encode()).hexdigest()[:16]}"
        self._before: dict[str, Seen] | None = None  # by uri
        self._new: dict[str, tuple[Record, str]] = {}  # likewise, with the stamp; not in the ledger yet

    def before(self, name: str, where: Path, stamp: str) -> Record | None:
        """Return the record that an earlier server made of this place if its files still have this stamp, else None.

        A second call for the same place returns None.

        Raises ServerUnavailableError, AdapterSourceError.
        """
        if self._before is None:
            self._before = self._ledger.seen() if self._ledger is not None else {}
        seen = self._before.pop(uri_of(where), None)
        if seen is None or seen.stamp != self._stamp(stamp):
            return None
        return replace(Record.decode(seen.record.encode()), name=name, path=str(real_path(where)), pinned=seen.pinned)

    def _stamp(self, stamp: str) -> str:
        """Return the files' stamp, prefixed with this release and model: another reader does not match it."""
        return f"{self._reader}/{stamp}"

    def note(self, record: Record, stamp: str) -> None:
        """Queue a record that was read just now for the next `keep`."""
        self._new[record.uri] = record, stamp

    def keep(self) -> None:
        """Write the queued records to the ledger; if it is unreachable, log it and retry on the next call."""
        if self._ledger is None or not self._new:
            return
        try:
            pinned = self._ledger.pinned_places()
            self._ledger.see(
                Seen(uri, self._stamp(stamp), uri in pinned, one.encode().decode())
                for uri, (one, stamp) in self._new.items()
            )
        except ServerUnavailableError as error:
            log.warning("records of the followed directory cannot be stored yet; trying again", reason=str(error))
        else:
            self._new = {}

    def pinned(self) -> set[str]:
        """Return the URIs of pinned adapters. Raises ServerUnavailableError."""
        return self._ledger.pinned_places() if self._ledger is not None else set()
