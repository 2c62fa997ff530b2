"""Registration of shards. A shard keeps its state while the controller is away and reports it to the next one.

A *run* is what handles and leases belong to. A controller that starts takes over the run that its shards
kept, and is settled once all of them have registered. From then on the controller is the authority: a shard
that kept another run's state drops it. A rank has one claimant at a time. Claims count up, so a shard that
returns with a lower claim than the newest was replaced meanwhile and is rejected.

Where shards have twins, a controller that starts waits a while for all of them (`twin_wait`). Then it is settled
with one of each. While the server is resized, the shards of its other placement register with a table of their own.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence

import structlog

from lora_server.access.identity import OPERATOR
from lora_server.clock import SYSTEM, Clock
from lora_server.control.adapters.server_adapters import ServerAdapters
from lora_server.control.clients import Clients
from lora_server.control.members.agreement import Agreement
from lora_server.control.members.shards import ShardHandle, ShardTable
from lora_server.control.start import StartState
from lora_server.control.sync.shard_sync import ShardSync
from lora_server.errors import ConfigError, LeaseError
from lora_server.registry.versions import Version
from lora_server.timings import Timings
from lora_server.wire import lora_server_pb2 as pb
from lora_server.wire.events import SHARD, ShardChanged
from lora_server.wire.messages import badge_of

log = structlog.get_logger()


class Arrivals:
    """Registers shards, one at a time, and settles the server when all have come. Thread-safe."""

    def __init__(
        self,
        agreement: Agreement,
        shards: ShardTable,
        adapters: ServerAdapters,
        clients: Clients,
        start: StartState,
        restarted: bool,
        listed: Sequence[Version] | None = None,
        twin_wait: float = Timings.twin_wait,
        clock: Clock = SYSTEM,
    ) -> None:
        """`listed`: the ledger's versions, None without a ledger."""
        self.agreement, self._shards, self._adapters, self._clients = agreement, shards, adapters, clients
        self.other: Agreement | None = None  # in a resize: of the placement that does not serve yet, or not any more
        self._start, self._restarted, self._listed = start, restarted, listed
        self._clock, self._twins_until = clock, clock.now() + twin_wait
        self.run = ""
        self.on_run: Callable[[str], object] = lambda run: None  # called with the run before any request is admitted
        self._lock = threading.Lock()

    def arrive(self, registration: pb.Registration, kept: Sequence[pb.Kept]) -> ShardHandle:
        """Register a shard: learn the state that it kept, and send it what every shard must have.

        Raises ConfigError if it disagrees, LeaseError if its rank is another's.
        """
        handle = ShardHandle(registration)
        if (staged := self._staged(handle)) is not None:
            return self._stage(handle, staged)
        self._check(registration, self.agreement, self._shards)
        with self._lock:
            self._shards.arrive(handle, self._start.settled.is_set())  # first: what it keeps counts if it has its rank
            try:
                self._learn(handle, kept)
            except Exception as error:  # what an older version kept, say
                self._shards.depart(handle)
                raise ConfigError(f"shard {handle.shard}: what it kept cannot be read: {error!r}") from error
            self._settle_if_complete()
        if self.agreement.coordination == "leader":
            self._introduce_leader(handle, self._shards)
        log.info("shard up", shard=handle.shard, node=handle.node, pid=handle.registration.pid)
        self._publish(handle, "up")
        return handle

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Let no shard register or depart in the block."""
        with self._lock:
            yield

    def _staged(self, handle: ShardHandle) -> ShardSync | None:
        """Return what keeps the other placement of a resize, where a shard is of that: the one that does not serve yet,
        or the one that clients still leave. Raises LeaseError for a shard of a placement that is over."""
        other, generation, own = self._adapters.sync.other, handle.generation, self._shards.generation
        if generation in (0, own):
            return None
        if self.other is not None and other is not None and generation == self.other.generation:
            return other
        raise LeaseError(
            f"shard {handle.shard}: got a claim of placement generation {generation}, expected {own}; "
            f"pid {handle.registration.pid} of node {handle.node} ends"
        )

    def _stage(self, handle: ShardHandle, staged: ShardSync) -> ShardHandle:
        """Register a shard of the other placement of a resize: it loads what is in use first."""
        with self._lock:
            if self.other is None or self._staged(handle) is not staged:
                raise LeaseError(f"shard {handle.shard}: the server is not resized any more; it ends")
            self._check(handle.registration, self.other, staged.shards)
            staged.shards.arrive(handle)
            handle.commands.send(self._claim(handle, self.run, staged.shards))
            staged.introduce(handle, (), first=self._adapters.admission.active())
            if handle.generation < self._shards.generation:  # it came back to the clients that have not left it
                self._clients.introduce_all(handle)
            self._adapters.admission.introduce(handle)
        if self.other is not None and self.other.coordination == "leader":
            self._introduce_leader(handle, staged.shards)
        log.info(
            "shard up", shard=handle.shard, node=handle.node, pid=handle.registration.pid, generation=handle.generation
        )
        return handle

    def settle(self) -> None:
        """Settle the server once twins have been waited for. To be called about once a second."""
        with self._lock:
            self._settle_if_complete()

    def _settle_if_complete(self) -> None:
        if self._start.settled.is_set():
            return
        layout, live = self.agreement.layout, self._shards.live()
        absent = [shard for shard in range(layout.num_shards) if shard not in live]
        if not absent or (self._clock.now() >= self._twins_until and not layout.unserved(absent)):
            self._settle()

    def _learn(self, handle: ShardHandle, kept: Sequence[pb.Kept]) -> None:
        registration, settled = handle.registration, self._start.settled.is_set()
        if registration.run and not settled:
            self.run = self.run or registration.run
        if registration.run and registration.run != self.run:
            handle.commands.send(self._claim(handle, self.run, self._shards))  # drops what it keeps of another run
            kept = ()
        presumed: Sequence[int] = ()
        loads, grants = [one for one in kept if one.load.handle], [one.grant for one in kept if one.grant.client]
        if not settled and registration.run == self.run:
            if self._restarted and registration.registered:
                self._start.registered.set()
                if registration.HasField("refused"):
                    self._adapters.catalog.refusals.adopt(registration.refused)
            self._adapters.recovery.adopt((one.load for one in loads), registration.gone, registration.last_handle)
            self._clients.adopt(grants, registration.last_client)
            presumed = registration.active
        handle.commands.send(self._claim(handle, self.run if settled else "", self._shards))
        self._adapters.sync.introduce(handle, loads)
        self._clients.twins.introduce(handle)
        self._adapters.admission.introduce(handle, presumed)
        self._clients.introduce(handle, grants)

    def _check(self, registration: pb.Registration, agreement: Agreement, shards: ShardTable) -> None:
        if registration.agreement_digest != agreement.digest() or registration.shard >= agreement.layout.num_shards:
            raise ConfigError(
                f"shard {registration.shard} of node {registration.node}: started with other settings than the "
                f"controller's ({agreement.describe()}); start every node with the same model and flags"
            )
        live, own = shards.live(), registration.pool_bytes
        for twin in agreement.layout.twins(registration.shard):
            is_other = twin in live and twin != registration.shard
            if is_other and (pool := live[twin].registration.pool_bytes) != own:
                raise ConfigError(
                    f"shard {registration.shard} of node {registration.node}: got a device pool of {own:,} bytes, "
                    f"expected {pool:,}, as its twin has, shard {twin}; start every node with the same --device-pool"
                )

    def _claim(self, handle: ShardHandle, run: str, shards: ShardTable) -> pb.ShardCommand:
        registered, restarts = self._start.registered.is_set(), shards.ranks[handle.shard].restarts
        claim = pb.Claim(epoch=handle.epoch, run=run, registered=registered, restarts=restarts)
        claim.generation = shards.generation
        return pb.ShardCommand(claim=claim)

    def _settle(self) -> None:
        self.run = self.run or secrets.token_hex(8)
        if self._listed is not None:
            self._adapters.recovery.reconcile(self._listed)
        self.on_run(self.run)
        self._start.settled.set()
        self.announce()
        self._adapters.sync.settle()
        self._adapters.admission.cut_off_at(self._adapters.recovery.deadlines)
        self._adapters.admission.collect()

    def announce(self) -> None:
        """Tell the shards their run, and whether the start-up directory is registered."""
        for handle in self._shards.live().values():
            handle.commands.send(self._claim(handle, self.run, self._shards))

    def _introduce_leader(self, arrived: ShardHandle, shards: ShardTable) -> None:
        """Leader mode: a leader that arrives is followed by its stage; a follower follows its leader."""
        layout, shard = shards.layout, arrived.shard
        leader_index = layout.stage(shard) * layout.ep
        stage = {s: h for s, h in shards.live().items() if layout.stage(s) == layout.stage(shard)}
        leader = stage.pop(leader_index, None)
        if leader is None:
            return
        said = leader.registration
        follow = pb.Follow(address=said.order_address, certificate=said.endpoint.certificate)
        for follower in stage.values() if shard == leader_index else [arrived]:
            follow.badge = badge_of(said.order_badge, follower.shard)
            follower.commands.send(pb.ShardCommand(follow=follow))

    def depart(self, handle: ShardHandle) -> None:
        """Remove a shard that lost its stream."""
        with self._lock:
            is_serving = handle.generation == self._shards.generation
            departed = (self._shards if is_serving else self._shards.other or self._shards).depart(handle)
        if not is_serving:
            log.info("shard left", shard=handle.shard, pid=handle.registration.pid, generation=handle.generation)
        elif departed:
            self._adapters.sync.count()
            self._adapters.admission.admit()  # where its twin is up, no request waits for its loads any more
            fields = {"shard": handle.shard, "node": handle.node, "pid": handle.registration.pid}
            if handle.leaving or self._shards.closed:
                log.info("shard left", **fields)
                self._publish(handle, "left")
            else:
                log.error("shard lost", **fields)
                self._publish(handle, "lost")

    def _publish(self, handle: ShardHandle, state: str) -> None:
        event = ShardChanged(handle.shard, handle.node, handle.registration.pid, state)
        self._adapters.events.publish(SHARD, OPERATOR, event)
