"""Adapters of --adapters that are not served, and why. Shards keep the list for their controller.

Not thread-safe: `adapters` calls it under its lock.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import msgspec
import structlog

from lora_server.wire import lora_server_pb2 as pb

REMOVED = "removed"
TOLD_BYTES = 3 << 20  # a message of gRPC has 4 MiB
log = structlog.get_logger()


class Refusal(NamedTuple):
    """`code` is the error's; REMOVED for what was removed by hand, and stays so until its directory changes.

    `stamp` is the content's, in a directory that is followed; `start_up`: it was refused when the server started.
    """

    name: str
    uri: str
    code: str
    reason: str
    stamp: str = ""
    start_up: bool = False


class Refusals:
    """By name."""

    def __init__(self) -> None:
        self._by_name: dict[str, Refusal] = {}
        self._serial = 0

    def get(self, name: str) -> Refusal | None:
        """Also one that was removed by hand."""
        return self._by_name.get(name)

    def put(self, refusal: Refusal) -> None:
        """Instead of an earlier one of the name."""
        self._by_name[refusal.name] = refusal
        self._count()

    def pop(self, name: str) -> Refusal | None:
        """It is served now, or nobody's any more."""
        if name in self._by_name:
            self._count()
        return self._by_name.pop(name, None)

    def all(self) -> list[Refusal]:
        """By name, those that were removed by hand among them."""
        return sorted(self._by_name.values())

    def listed(self) -> list[Refusal]:
        """What users see of them."""
        return [one for one in self.all() if one.code != REMOVED]

    def _count(self) -> None:
        """Later lists have higher serials, also those of later controllers."""
        self._serial = max(self._serial + 1, int(time.time()))

    def tell(self) -> pb.Refusals:
        """For a shard to keep: all of them, or as many as a message takes."""
        encoded: list[bytes] = []
        nbytes = 0
        for one in map(msgspec.json.encode, self.all()):
            nbytes += len(one) + 1
            if nbytes > TOLD_BYTES:
                log.warning("more adapters are refused than shards keep", told=len(encoded), refused=len(self._by_name))
                break
            encoded.append(one)
        return pb.Refusals(refusals=b"[" + b",".join(encoded) + b"]", serial=self._serial)

    def adopt(self, told: pb.Refusals) -> None:
        """What a shard kept; of several, what was told last."""
        if told.serial > self._serial:
            kept = msgspec.json.decode(told.refusals, type=list[Refusal])
            self._serial, self._by_name = told.serial, {one.name: one for one in kept}
