"""Prefetches: clients announce which of the adapters that they hold their coming steps need.

An announcement that is too large or comes too soon is ignored. These are counted, by reason, and logged at a low rate.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping

import structlog

from lora_server.clock import SYSTEM, Clock
from lora_server.control.admission.holds import ClientHolds
from lora_server.control.members.leases import Leases
from lora_server.control.members.shards import ShardTable
from lora_server.logs import Repeats
from lora_server.timings import Timings
from lora_server.wire import lora_server_pb2 as pb
from lora_server.wire.terms import MAX_PREFETCHED, Proof

MAX_AHEAD_US = 60_000_000  # what is expected later counts as expected then
SPACING_US = 50_000  # each counts as expected so much later than the one before it: others' first ones go between
log = structlog.get_logger()


class Prefetches:
    """Checks clients' announcements and sends them to the shards. Thread-safe.

    A client's last announcement replaces the one before it, so at most MAX_PREFETCHED of its handles are outstanding.
    """

    def __init__(
        self,
        leases: Leases,
        holds: ClientHolds,
        shards: ShardTable,
        gap_seconds: float = Timings.prefetch_gap,
        clock: Clock = SYSTEM,
    ) -> None:
        """`gap_seconds`: between two of one client."""
        self._leases, self._holds, self._shards = leases, holds, shards
        self._gap_seconds, self._clock = gap_seconds, clock
        self.ignored = Counter(dict.fromkeys(("too much", "too often", "not held"), 0))  # by why
        self._complain = Repeats(log.info)
        self._announced: dict[int, set[int]] = {}  # by client
        self._quiet_until: dict[int, float] = {}
        self._lock = threading.Lock()

    def receive(self, proof: Proof, expected: Mapping[int, int]) -> None:
        """Take a client's announcement: handles, and in how many microseconds it expects to need each."""
        client = proof.client
        self._complain.flush()
        with self._lock:  # a client that goes is forgotten before it, or after it
            if self._leases.proven(proof) is None:
                return
            if len(expected) > MAX_PREFETCHED:
                self._ignore("too much", client=client, adapters=len(expected))
            elif self._clock.now() < self._quiet_until.get(client, 0.0):
                self._ignore("too often", client=client)
            else:
                self._quiet_until[client] = self._clock.now() + self._gap_seconds
                self._pass_on(client, expected)

    def _pass_on(self, client: int, expected: Mapping[int, int]) -> None:
        held = self._holds.of(client, expected)
        if len(held) < len(expected):
            self._ignore("not held", client=client, handles=sorted(expected.keys() - held)[:8])
        self._announced[client] = held
        in_order = sorted((in_us, handle) for handle, in_us in expected.items() if handle in held)
        needs = [
            pb.Need(handle=handle, in_us=min(max(in_us, place * SPACING_US), MAX_AHEAD_US))
            for place, (in_us, handle) in enumerate(in_order)
        ]
        self._tell(client, needs)

    def released(self, client: int) -> None:
        """Withdraw a client's announcement once it has released all handles in it."""
        with self._lock:
            announced = self._announced.get(client)
            if announced and not self._holds.of(client, announced):
                self._announced[client] = set()
                self._tell(client, [])

    def forget(self, client: int) -> None:
        """Forget a client without a lease. The shards forget its needs when its lease is revoked there."""
        with self._lock:
            self._announced.pop(client, None)
            self._quiet_until.pop(client, None)

    def _tell(self, client: int, needs: list[pb.Need]) -> None:
        self._shards.tell(pb.ShardCommand(prefetch=pb.Prefetch(client=client, needs=needs)))

    def _ignore(self, why: str, **fields: object) -> None:
        self.ignored[why] += 1
        self._complain(why, "prefetch ignored", why=why, **fields)
