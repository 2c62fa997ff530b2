"""Adapters of --adapters that are not served, and why. Shards keep the list for their controller."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import NamedTuple

import msgspec
import structlog

from lora_server.control.adapters.records import Record
from lora_server.errors import LoraServerError, ServerUnavailableError
from lora_server.registry.attempts import Attempts
from lora_server.wire import bounds
from lora_server.wire import lora_server_pb2 as pb

REMOVED = "removed"
TOLD_BYTES = bounds.BOUNDS["Refusals.refusals"].length - 2  # without the brackets
log = structlog.get_logger()


class RefusedAdapter(NamedTuple):
    """`code` is the error's, or REMOVED for an adapter that was removed by hand, until its directory changes.

    `stamp` is the content's, in a directory that is followed; `start_up`: it was refused when the server started.
    """

    name: str
    uri: str
    code: str
    reason: str
    stamp: str = ""
    start_up: bool = False


class RefusedAdapters:
    """The refusals, by adapter name. Thread-safe; its lock is a leaf."""

    def __init__(self) -> None:
        self._by_name: dict[str, RefusedAdapter] = {}
        self._serial = 0
        self._lock = threading.RLock()

    def get(self, name: str) -> RefusedAdapter | None:
        """Return the refusal of a name, also of an adapter that was removed by hand."""
        return self._by_name.get(name)

    def put(self, refusal: RefusedAdapter) -> None:
        """Set the refusal of its name."""
        with self._lock:
            self._by_name[refusal.name] = refusal
            self._count()

    def pop(self, name: str) -> RefusedAdapter | None:
        """Remove and return the refusal of a name: it is served now, or its directory is gone."""
        with self._lock:
            if name in self._by_name:
                self._count()
            return self._by_name.pop(name, None)

    def accept(self, name: str) -> bool:
        """Remove the refusal of a name that is served now; return whether there was one."""
        refusal = self.pop(name)
        if refusal is not None and refusal.code != REMOVED:
            log.info("adapter not refused any more", name=name)
        return refusal is not None

    def names(self) -> set[str]:
        """Return the names that are refused, or were removed by hand."""
        with self._lock:
            return set(self._by_name)

    def all(self) -> list[RefusedAdapter]:
        """Return all by name, those that were removed by hand among them."""
        with self._lock:
            return sorted(self._by_name.values())

    def listed(self) -> list[RefusedAdapter]:
        """Return what users see of them."""
        return [one for one in self.all() if one.code != REMOVED]

    def _count(self) -> None:
        """Raise the serial: later lists have higher ones, also those of later controllers."""
        self._serial = max(self._serial + 1, int(time.time()))

    def tell(self) -> pb.Refusals:
        """Return the list for a shard to keep: all of it, or as much as a message takes."""
        encoded: list[bytes] = []
        nbytes = 0
        with self._lock:
            for one in map(msgspec.json.encode, self.all()):
                nbytes += len(one) + 1
                if nbytes > TOLD_BYTES:
                    refused = len(self._by_name)
                    log.warning("more adapters are refused than shards keep", told=len(encoded), refused=refused)
                    break
                encoded.append(one)
            return pb.Refusals(refusals=b"[" + b",".join(encoded) + b"]", serial=self._serial)

    def adopt(self, told: pb.Refusals) -> None:
        """Take the list that a shard kept, if it is later than this one."""
        with self._lock:
            if told.serial > self._serial:
                kept = msgspec.json.decode(told.refusals, type=list[RefusedAdapter])
                self._serial, self._by_name = told.serial, {one.name: one for one in kept}


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
