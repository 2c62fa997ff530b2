"""NVSHMEM's world as the controller sees it: the processes' places in it, when it is made, and when it is over.

NVSHMEM makes a world once, of a fixed number of processes. No process joins it later or leaves it, and a process is in
one world in its life. So the controller *gathers* a world first: shards have the first ranks, engines lease the others
when they join, and the place of an engine that leaves goes to the next one. Shard 0's process makes the world's unique
id; the controller sends it to all members once they are complete. From then on places belong to processes: an engine
that left may return to its own place, and the place of one that died stays empty. A shard's death ends the world: the
other shards restart, engines lose their leases, and the next world is gathered.
"""

from __future__ import annotations

import hmac
import threading
from collections.abc import Iterable

import structlog

from lora_server.clock import SYSTEM, Clock
from lora_server.control.members.shards import ShardTable
from lora_server.errors import ConfigError, ServerUnavailableError, WorldError
from lora_server.timings import Timings
from lora_server.wire import lora_server_pb2 as pb

log = structlog.get_logger()


class EnginePlaces:
    """The ranks of a world that engines lease, and the clients that have them. Not thread-safe: the world's lock."""

    def __init__(self, ranks: range, rest_seconds: float, clock: Clock) -> None:
        """`rest_seconds`: after so long, the network delivers nothing more to a place that lost its process."""
        self.ranks, self._rest_seconds, self._clock = ranks, rest_seconds, clock
        self.clients: dict[int, int] = {}  # by rank
        self._rests: dict[int, float] = {}  # rank -> when it may be leased again

    def clear(self) -> None:
        """Take every place back: the world is over."""
        self.clients, self._rests = {}, {}

    def free(self) -> list[int]:
        """List the ranks that no client has."""
        return [rank for rank in self.ranks if rank not in self.clients]

    def check_idle(self, rank: int) -> None:
        """Raise ServerUnavailableError while a client has this rank, or steps may still be on their way to it."""
        if rank in self.clients:
            raise ServerUnavailableError(f"NVSHMEM: PE {rank} still has the lease of client {self.clients[rank]}")
        seconds = self._rests.get(rank, 0.0) - self._clock.now()
        if seconds > 0:
            raise ServerUnavailableError(
                f"NVSHMEM: PE {rank} was cut off, and what it sent may still be on its way; it may come back in "
                f"{seconds:.0f} s"
            )

    def give_back(self, client: int, rests: bool) -> None:
        """Take the places of a client back; with `rests`, none of them is leased again before its rest is over."""
        for rank in [rank for rank, holder in self.clients.items() if holder == client]:
            del self.clients[rank]
            if rests:
                self._rests[rank] = self._clock.now() + self._rest_seconds


class WorldMembership:
    """The shards and engines of one world at a time. Thread-safe. Without places for engines there is no world."""

    def __init__(
        self,
        table: ShardTable,
        shards: int,
        clients: int = 0,
        slots: int = 0,
        rest_seconds: float = Timings.world_rest,
        clock: Clock = SYSTEM,
    ) -> None:
        self._table, self._slots, self._clock = table, slots, clock
        self._engines = EnginePlaces(range(shards, shards + clients), rest_seconds, clock)
        self._lock = threading.Lock()
        self._number, self._uid, self._made = 0, b"", False
        self._here: dict[int, str] = {}  # shards, and the instances of their processes

    def arrive(self, registration: pb.Registration) -> set[int]:
        """Record a shard's process that registered; return the clients of the world that this ended."""
        if not self._engines.ranks:
            return set()
        shard, place = registration.shard, registration.place
        with self._lock:
            if place.world and not self._number:  # of an earlier controller's
                self._number, self._uid, self._made = place.world, place.uid, True
            if place.world:
                if place.world == self._number and self._made:
                    self._here[shard] = registration.instance
                else:
                    self._start_anew([shard])
                return set()
            if self._made and self._here.get(shard) == registration.instance:  # the command did not reach it
                self._tell(shard)
                return set()
            over = self._begin(shard) if self._made or not self._number else set()
            self._here[shard] = registration.instance
            if shard == 0:
                self._uid = place.uid
            self._make()
            return over

    def _begin(self, first: int) -> set[int]:
        """Begin to gather a world with this shard as its first member; return the clients of the world that this ends.

        Its number is above all earlier ones, also those of earlier controllers.
        """
        over = set(self._engines.clients.values()) if self._made else set()
        if self._made:
            log.error("NVSHMEM's world is over: a shard died; the others restart", world=self._number)
            self._start_anew(self._here.keys() - {first})
            self._engines.clear()
        self._number, self._uid, self._made = max(self._number + 1, int(self._clock.time())), b"", False
        self._here = {}
        return over

    def _start_anew(self, shards: Iterable[int]) -> None:
        live = self._table.live()
        for shard in shards:
            if shard in live:
                live[shard].commands.send(pb.ShardCommand(stop=True))

    def _make(self) -> None:
        """Make the world if all its members are there: send every shard its place and the unique id."""
        if self._made or not self._uid or len(self._here) + len(self._engines.clients) < self._engines.ranks.stop:
            return
        self._made = True
        for shard in self._table.live():
            self._tell(shard)
        log.info("NVSHMEM's world is complete", world=self._number, pes=self._engines.ranks.stop)

    def _tell(self, shard: int) -> None:
        handle = self._table.live().get(shard)
        if handle is not None:  # else it registers once more
            handle.commands.send(pb.ShardCommand(place=self._place(shard)))

    def _place(self, rank: int) -> pb.Place:
        uid = self._uid if self._made else b""
        size = self._engines.ranks.stop
        return pb.Place(world=self._number, rank=rank, size=size, uid=uid, slots=self._slots)

    # -- clients

    def take(self, client: int, asked: pb.Place) -> pb.Place:
        """Lease a place to a client: a free one, or the one that its process has already.

        Raises WorldError if there is none for it, ServerUnavailableError if there will be one soon, and ConfigError if
        the server has no world.
        """
        if not self._engines.ranks:
            raise ConfigError(
                "transport nvshmem: the server has no such world; start it with --device cuda --gpu-transport nvshmem "
                "--nvshmem-clients N, or attach with transport='auto'"
            )
        with self._lock:
            rank = self._own(asked) if asked.world else self._free()
            self._engines.clients[rank] = client
            self._make()
            return self._place(rank)

    def _own(self, asked: pb.Place) -> int:
        known = hmac.compare_digest(asked.uid, self._uid) and asked.rank in self._engines.ranks
        if not (self._made and known and asked.world == self._number):
            raise WorldError(
                f"NVSHMEM: this process was PE {asked.rank} of world {asked.world}, which is over, and a process is in "
                "one world in its life: start the engine anew, or attach with transport='tcp'"
            )
        self._engines.check_idle(asked.rank)
        return int(asked.rank)

    def _free(self) -> int:
        free, size = self._engines.free(), len(self._engines.ranks)
        if self._made:
            raise WorldError(
                f"NVSHMEM: world {self._number} is complete, and no process joins it any more ({len(free)} of "
                f"{size} places of engines are idle, of processes that left or died); start the "
                "server and all engines anew, or attach with transport='gpu' or 'tcp'"
            )
        if not free:
            raise WorldError(
                f"NVSHMEM: all {size} places of engines are taken; start the server with a larger "
                "--nvshmem-clients, or attach with transport='gpu' or 'tcp'"
            )
        return free[0]

    def of(self, client: int) -> pb.Place:
        """Return a client's place as it is now; raises WorldError if it has none."""
        with self._lock:
            for rank, holder in self._engines.clients.items():
                if holder == client:
                    return self._place(rank)
        raise WorldError(f"NVSHMEM: client {client} has no place; join again")

    def adopt(self, client: int, rank: int) -> None:
        """Take over a client's place that a shard kept from an earlier controller; rank 0 means no place."""
        if rank:
            with self._lock:
                self._engines.clients[rank] = client

    def give_back(self, client: int, rests: bool) -> None:
        """Free the place of a client without a lease. `rests`: keep it unused for a while, since the client was cut off
        and steps of it may still be in flight."""
        with self._lock:
            self._engines.give_back(client, rests and self._made)

    @property
    def reason(self) -> str:
        """Return why steps cannot use the world; empty if they can, or if the server has none."""
        with self._lock:
            ranks = self._engines.ranks
            if self._made or not ranks:
                return ""
            here, clients = len(self._here), len(self._engines.clients)
            return f"NVSHMEM's world: {here} of {ranks.start} shards and {clients} of {len(ranks)} engines are here"
