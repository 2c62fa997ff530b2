"""Remembers why an adapter's last update failed, for `adapters show`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import structlog

from lora_server.control.adapters.records import Record
from lora_server.errors import LoraServerError, ServerUnavailableError
from lora_server.registry.attempts import Attempts

log = structlog.get_logger()


class UpdateFailures:
    """Reasons why adapters' last updates failed, by adapter name. Thread-safe. `kept` stores them for the next
    controller."""

    def __init__(self, kept: Attempts | None) -> None:
        """Read the stored reasons; raises ServerUnavailableError."""
        self._kept = kept
        self._why = kept.all() if kept is not None else {}

    def why(self, name: str) -> str:
        """Return why the last update of an adapter failed; empty if it did not."""
        return self._why.get(name, "")

    def names(self) -> set[str]:
        """Return the names with such a reason."""
        return set(self._why)

    def forget(self, name: str) -> None:
        """Forget a name that means something else now; the ledger forgot it in the same change."""
        self._why.pop(name, None)

    @contextlib.contextmanager
    def of(self, served: Record) -> Iterator[None]:
        """Watch an update: store that it began, and how it ended. Raises ServerUnavailableError where the beginning
        cannot be stored."""
        name, begun = served.name, time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        killed = f"the update begun {begun} did not end, as when the controller is killed in it"
        if self._kept is not None:
            self._kept.keep(name, f"{killed}; version {served.version[:12]} serves on")
        try:
            yield
        except LoraServerError as error:
            self._why[name] = f"the update begun {begun} failed: {error}"
            self._write(name, self._why[name])
            raise
        self._why.pop(name, None)
        self._write(name, "")

    def _write(self, name: str, why: str) -> None:
        if self._kept is None:
            return
        try:
            self._kept.keep(name, why) if why else self._kept.forget(name)
        except ServerUnavailableError as error:  # the caller is told what became of the update
            log.warning("an update's outcome cannot be stored", name=name, reason=str(error))
