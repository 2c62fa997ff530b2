"""What adapters of a directory were when they were read: what nobody touched since need not be read again."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import structlog

from lora_server import __version__
from lora_server.control.adapters.origins import uri_of
from lora_server.control.adapters.registry import Record
from lora_server.errors import ServerUnavailableError
from lora_server.registry.versions import Ledger, Seen

log = structlog.get_logger()


def kept_stamp(spec_digest: str, stamp: str) -> str:
    """Of files, and of what read them."""
    return f"{__version__}/{spec_digest}/{stamp}"


class Readings:
    """Of a followed directory, for the next server. Not thread-safe."""

    def __init__(self, ledger: Ledger | None, spec_digest: str) -> None:
        self._ledger, self._spec_digest = ledger, spec_digest
        self._before: dict[str, Seen] | None = None  # by uri
        self._new: dict[str, Record] = {}  # likewise; not in the ledger yet

    def before(self, where: Path, stamp: str) -> Record | None:
        """What an earlier server read there, if the files have this stamp still; asked again it is not known any more.

        Raises ServerUnavailableError.
        """
        if self._before is None:
            self._before = self._ledger.seen() if self._ledger is not None else {}
        seen = self._before.pop(uri_of(where), None)
        if seen is None or seen.stamp != kept_stamp(self._spec_digest, stamp):
            return None
        return replace(Record.decode(seen.record.encode()), path=os.path.realpath(where), found=stamp)

    def note(self, record: Record) -> None:
        """It was read just now."""
        self._new[record.uri] = record

    def keep(self) -> None:
        """What was noted, for good; where the ledger is not reached, the next time."""
        if self._ledger is None or not self._new:
            return
        try:
            pinned = self._ledger.pinned_places()
            self._ledger.see(
                Seen(uri, kept_stamp(self._spec_digest, one.found), uri in pinned, one.encode().decode())
                for uri, one in self._new.items()
            )
        except ServerUnavailableError as error:
            log.warning("what was read of the followed directory is not kept yet", reason=str(error))
        else:
            self._new = {}

    def pinned(self) -> set[str]:
        """Places whose adapters are pinned. Raises ServerUnavailableError."""
        return self._ledger.pinned_places() if self._ledger is not None else set()
