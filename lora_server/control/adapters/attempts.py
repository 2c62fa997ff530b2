"""What is said of an update that did not come to its end, where its adapter is shown."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import structlog

from lora_server.control.adapters.registry import Record
from lora_server.errors import LoraServerError, ServerUnavailableError
from lora_server.registry import attempts

log = structlog.get_logger()


class Attempts:
    """Thread-safe. `kept` says it to the next controller, too."""

    def __init__(self, kept: attempts.Attempts | None) -> None:
        """Raises ServerUnavailableError."""
        self._kept = kept
        self._why = kept.all() if kept is not None else {}

    def why(self, name: str) -> str:
        """Of the last update of an adapter, if it failed or was killed."""
        return self._why.get(name, "")

    def forget(self, name: str) -> None:
        """Its name means something else now, or nothing; what is kept went with that change."""
        self._why.pop(name, None)

    @contextlib.contextmanager
    def of(self, served: Record) -> Iterator[None]:
        """While an adapter is updated. Raises ServerUnavailableError where it cannot be kept that it is."""
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
        except ServerUnavailableError as error:  # what became of the update is told to who asked for it
            log.warning("how an update ended is not kept", name=name, reason=str(error))
