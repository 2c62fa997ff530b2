"""The clients of a server: their leases, what shards are told of them, and what they ask about adapters."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import structlog

from lora_server.clock import SYSTEM, Clock
from lora_server.control.admission.service import AdmissionAnswer, AdmissionService, CheckInUse
from lora_server.control.members.leases import NO_TRAITS, ClientLease, EngineTraits, Leases
from lora_server.control.members.shards import ShardHandle, ShardTable, SharedCommand, wait_all
from lora_server.control.members.twins import TwinConnections
from lora_server.control.members.world import WorldMembership
from lora_server.control.prefetch import Prefetches
from lora_server.control.start import RESTARTED, StartState
from lora_server.errors import LeaseError, LoraServerError, ServerUnavailableError
from lora_server.per_tenant import PerTenant
from lora_server.timings import DEFAULTS, Timings
from lora_server.wire import lora_server_pb2 as pb
from lora_server.wire.terms import Proof
from lora_server.wire.waits import WaitHistograms

MAX_WAITERS = 64  # clients that wait for a place on a thread of ours
log = structlog.get_logger()


class Clients:
    """A server's clients: their leases, holds and prefetches. Thread-safe.

    Calls with an unknown lease get ServerUnavailableError until the start is settled, and LeaseError from then on.
    """

    def __init__(
        self,
        leases: Leases,
        shards: ShardTable,
        admission: AdmissionService,
        start: StartState,
        world: WorldMembership,
        timings: Timings = DEFAULTS,
        clock: Clock = SYSTEM,
    ) -> None:
        self.leases, self._shards, self._admission, self._start = leases, shards, admission, start
        self.world, self._timings = world, timings
        self.twins = TwinConnections(leases, shards)
        self.prefetches = Prefetches(leases, admission.holds, shards, timings.prefetch_gap, clock)
        self.waits = PerTenant(WaitHistograms)  # what requests waited for, by the tenant of their engine
        self.refused = ""  # why joins are refused; empty if they are not
        self._ended: set[tuple[int, int]] = set()  # clients and epochs that a shard reported before all were heard

    def join(
        self,
        instance: str,
        engine: EngineTraits = NO_TRAITS,
        asked: pb.Place | None = None,
        pushes: bool = False,
        weight: float = 1.0,
        step_us: int = 0,
    ) -> tuple[ClientLease, dict[int, ShardHandle]]:
        """Grant a lease, with the place in NVSHMEM's world that is asked for; return it once every shard knows of it.

        `pushes`: it will push steps, of a tenant of that `weight`; `step_us`: see EngineClass.

        Raises ServerUnavailableError while a shard is not up, WorldError.
        """
        if self.refused:
            raise ServerUnavailableError(self.refused)
        self._shards.require_up()
        self._start.require_settled()
        lease = self.leases.grant(instance, engine, self._shards.layout.replicas if pushes else 0)
        grant = lease.granted(weight, step_us, self._shards.generation)
        try:
            if asked is not None:
                lease.place = self.world.take(lease.client, asked)
                grant.pe = lease.place.rank
            lease.generation = grant.generation if pushes else 0
            lease.grant = grant  # first: a shard that arrives is sent it
            live = self._shards.require_up()
            shared = SharedCommand(pb.ShardCommand(grant=grant), has_outcome=True)
            sent = [handle.commands.send(shared) for handle in live.values()]
            wait_all(sent, self._timings.grant, "a grant")
        except LoraServerError:
            self.end(lease.client, lease.epoch)
            raise
        log.info("client joined", client=lease.client, instance=instance, tenant=engine.tenant)
        return lease, live

    def renew(self, proof: Proof) -> int:
        """Extend a client's lease and return its id. Raises LeaseError if the lease is gone, or is another's."""
        try:
            return self.leases.renew(proof)
        except LeaseError:
            if self._start.settled.is_set():
                raise
            raise ServerUnavailableError(RESTARTED) from None

    def heartbeat(
        self,
        proof: Proof,
        settled: Iterable[int] = (),
        waits: Sequence[pb.PhaseStats] = (),
        generation: int = 0,
    ) -> bool:
        """Renew a client's lease, count the `waits` of its requests, and forget the tickets of which it has the answers
        (`settled`); return whether the client has to report its holds with `restore`. `generation`: of the placement
        that its steps go by, 0 where it does not say. Raises LeaseError."""
        client = self.renew(proof)
        if (lease := self.leases.proven(proof)) is not None:
            if generation or lease.generation < 0:
                lease.generation = generation
            if waits:
                self.waits.of(lease.engine.tenant).merge(waits)
        self._admission.settle(client, settled)
        return self._admission.holds.is_unknown(client)

    def leave(self, proof: Proof, unanswered: bool = False) -> None:
        """End a client's lease at its own request; no-op if it has none. `unanswered`: steps of it may still be in
        flight."""
        if self.leases.proven(proof) is not None:
            self.world.give_back(proof.client, rests=unanswered)
            self.end(proof.client, proof.epoch)

    def end(self, client: int, epoch: int) -> None:
        """End the lease of a client that left, died or was silent: cut it off everywhere and release what it held."""
        if not self._start.settled.is_set():
            self._ended.add((client, epoch))
        if self.leases.end(client, epoch):
            self._forget(client)

    def gone(self, handle: ShardHandle, client: int, epoch: int) -> None:
        """Note that a client's connection to a shard ended; end its lease unless it has one to a twin that is up, its
        steps still go by the placement before, or the shard's placement does not serve."""
        lease = self.leases.find(client, epoch)
        is_over = self._start.settled.is_set() and lease is None
        if lease is not None and 0 < lease.generation < handle.generation:
            return  # it could not connect to all new shards, and tries again
        if not is_over and self.twins.part(handle, client):
            self.end(client, epoch)

    def end_all(self) -> None:
        """End the leases of all clients. Call it when none holds an adapter; a client joins again for its next one."""
        for lease, _ in self.leases.silences():
            self.end(lease.client, lease.epoch)

    def end_where(self, ends: Callable[[ClientLease], bool], why: str) -> None:
        """End the leases of which `ends` is true, whatever their clients hold, and log `why`."""
        for lease, _ in self.leases.silences():
            if ends(lease):
                whose = {"instance": lease.instance, "tenant": lease.engine.tenant}
                log.warning("lease ended", client=lease.client, **whose, why=why)
                self.end(lease.client, lease.epoch)

    def expire(self) -> None:
        """End the leases that have expired. Called about once a second."""
        for lease in self.leases.take_expired():
            log.warning("lease expired", client=lease.client, instance=lease.instance)
            self._forget(lease.client)

    def borrow(self, proof: Proof, holder: Proof) -> None:
        """Let one client's steps use the adapters that `holder` holds; raises LeaseError for either."""
        client, lender = self.renew(proof), self.renew(holder)
        if (lease := self.leases.proven(proof)) is not None:
            lease.holder = lender
        command = pb.ShardCommand(borrow=pb.Borrow(client=client, holder=lender))
        wait_all(self._shards.broadcast(command), self._timings.grant, "what a client borrows")

    def adopt(self, grants: Iterable[pb.Grant], last_client: int) -> None:
        """Take over the clients that a shard kept from an earlier controller of the same run."""
        alive = (grant for grant in grants if (grant.client, grant.epoch) not in self._ended)
        for grant in self.leases.adopt(alive, last_client):
            self._admission.holds.expect(grant.client)
            self.world.adopt(grant.client, grant.pe)

    def introduce(self, handle: ShardHandle, grants: Iterable[pb.Grant]) -> None:
        """Have a shard that registered revoke the clients that have no lease any more. If its registration ended an
        NVSHMEM world, end the leases of that world's clients."""
        for grant in grants:
            if self.leases.find(grant.client, grant.epoch) is None:
                handle.commands.send(pb.ShardCommand(revoke=grant.client))
        over = self.world.arrive(handle.registration)
        self.end_where(lambda lease: lease.client in over, "NVSHMEM's world is over")

    def introduce_all(self, handle: ShardHandle) -> None:
        """Send a shard of either placement of a resize the clients that there are, before what they hold."""
        for lease, _ in self.leases.silences():
            if lease.grant is not None:
                grant = pb.Grant()
                grant.CopyFrom(lease.grant)
                grant.generation = handle.generation
                lease.grant.generation = max(lease.grant.generation, handle.generation)
                handle.commands.send(pb.ShardCommand(grant=grant))
            if self.leases.find(lease.client, lease.epoch) is None:  # it left in between
                handle.commands.send(pb.ShardCommand(revoke=lease.client))

    def place_of(self, proof: Proof) -> pb.Place:
        """See WorldMembership.of; raises LeaseError."""
        return self.world.of(self.renew(proof))

    def _forget(self, client: int) -> None:
        self.twins.forget(client)
        self.prefetches.forget(client)
        self.world.give_back(client, rests=True)
        self._shards.tell(pb.ShardCommand(revoke=client))
        self._admission.forget_client(client)
        log.info("client gone", client=client)


class AdapterRequests:
    """Requests of clients about adapters. Thread-safe. Each renews the lease of its client, or raises LeaseError."""

    def __init__(
        self,
        clients: Clients,
        admission: AdmissionService,
        await_seconds: float = Timings.await_call,
        max_waiters: int = MAX_WAITERS,
    ) -> None:
        """`await_seconds`: the longest that one call waits."""
        self._clients, self._admission, self._await_seconds = clients, admission, await_seconds
        self._waiters = threading.Semaphore(max_waiters)

    def acquire(
        self,
        proof: Proof,
        names: Sequence[str],
        ticket: int = 0,
        tenant: str = "",
        weight: float = 1.0,
        check: CheckInUse | None = None,
        pace: float | None = None,
        slo_class: str = "",
    ) -> AdmissionAnswer:
        """Hold adapters for a tenant, or queue for them. `slo_class`: the tenant's; without one it is the client's.
        Raises UnknownAdapterError, and what `check` does."""
        client, lease = self._clients.renew(proof), self._clients.leases.proven(proof)
        slo_class = slo_class or (lease.engine.slo_class if lease is not None else "")
        return self._admission.acquire(client, names, ticket, tenant, weight, check, pace, slo_class)

    @contextmanager
    def together(self, proof: Proof) -> Iterator[None]:
        """Make the calls of the block as one: no other client's comes between them."""
        self._clients.renew(proof)
        with self._admission.queue.updates.together():
            yield

    def is_new(self, proof: Proof, ticket: int) -> bool:
        """Return whether a client has not asked with this ticket yet."""
        return self._admission.queue.tickets.find((proof.client, ticket)) is None

    def wait_admitted(self, proof: Proof, tickets: Sequence[int], seconds: float) -> list[int]:
        """Wait as AdmissionService does; answer at once while `max_waiters` clients wait already."""
        client = self._clients.renew(proof)
        if not self._waiters.acquire(blocking=False):
            return self._admission.wait_admitted(client, tickets, 0.0)
        try:
            return self._admission.wait_admitted(client, tickets, min(seconds, self._await_seconds))
        finally:
            self._waiters.release()

    def cancel(self, proof: Proof, tickets: Sequence[int]) -> None:
        """Cancel tickets. Raises AdmissionError."""
        self._admission.cancel(self._clients.renew(proof), tickets)

    def release(self, proof: Proof, handles: Iterable[int]) -> None:
        """Release adapters."""
        client = self._clients.renew(proof)
        self._admission.release(client, handles)
        self._clients.prefetches.released(client)

    def prefetch(self, proof: Proof, needs: Mapping[int, int]) -> None:
        """Announce in how many microseconds which handle is needed; see Prefetches."""
        self._clients.renew(proof)
        self._clients.prefetches.receive(proof, needs)

    def restore(self, proof: Proof, handles: Iterable[int]) -> None:
        """Take back the holds of a client of an earlier controller; only its first call counts."""
        client = self._clients.renew(proof)
        if self._admission.holds.is_unknown(client):
            self._admission.restore(client, handles)
