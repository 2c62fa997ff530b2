"""The controller: adapters, clients and shards put together. No sockets here; `service` has them."""

from __future__ import annotations

from lora_server.clock import SYSTEM, Clock
from lora_server.control.adapters.allowed import NOWHERE, Allowed
from lora_server.control.adapters.server_adapters import ServerAdapters
from lora_server.control.arrivals import Arrivals
from lora_server.control.clients import MAX_WAITERS, AdapterRequests, Clients
from lora_server.control.drain import Drain
from lora_server.control.events.log import EventLog
from lora_server.control.members.agreement import Agreement
from lora_server.control.members.leases import Leases
from lora_server.control.members.nodes import NodeTable
from lora_server.control.members.shards import ShardHandle, ShardTable
from lora_server.control.members.world import WorldMembership
from lora_server.control.resize import NO_RESIZE, Resize, ResizedParts, ResizeSupport
from lora_server.control.start import StartState
from lora_server.registry.versions import Ledger
from lora_server.slo import NO_CLASSES, SloClasses
from lora_server.sources.copies import Copies
from lora_server.sources.fetch import Fetcher
from lora_server.timings import DEFAULTS, Timings
from lora_server.wire import lora_server_pb2 as pb


class Controller:
    """Everything that one server's control plane knows; each part is thread-safe."""

    def __init__(
        self,
        agreement: Agreement,
        leases: Leases | None = None,
        restarted: bool = False,
        require_all_adapters: bool = False,
        max_active_adapters: int = 0,
        fetcher: Fetcher | None = None,
        allowed: Allowed = NOWHERE,
        ledger: Ledger | None = None,
        copies: Copies | None = None,
        timings: Timings = DEFAULTS,
        clock: Clock = SYSTEM,
        max_waiters: int = MAX_WAITERS,
        classes: SloClasses = NO_CLASSES,
        events: EventLog | None = None,
        resize: ResizeSupport = NO_RESIZE,
        nodes: NodeTable | None = None,
    ) -> None:
        """`restarted`: an earlier controller of this node may have registered the start-up directory. `fetcher` fetches
        remote adapters; `allowed` restricts the sources of adapters that are added; `ledger` keeps these adapters
        for good, `copies` their files."""
        self.start = start = StartState()
        self.nodes = NodeTable(agreement) if nodes is None else nodes
        self.nodes.run({agreement.generation: str(agreement.layout)})
        self.timings = timings
        self._require_all = require_all_adapters
        self.shards = ShardTable(
            agreement.layout, agreement.coordination, timings.shard_silence, clock, agreement.generation
        )
        leases = Leases(clock=clock) if leases is None else leases
        self.adapters = ServerAdapters.of(
            agreement,
            self.shards,
            start,
            leases,
            max_active_adapters,
            fetcher,
            allowed,
            ledger,
            copies,
            timings,
            clock,
            classes,
            events,
        )
        places = agreement.layout.num_shards, agreement.nvshmem_clients, agreement.slots
        world = WorldMembership(self.shards, *places, timings.world_rest, clock)
        self.clients = Clients(leases, self.shards, self.adapters.admission, start, world, timings, clock)
        self.requests = AdapterRequests(self.clients, self.adapters.admission, timings.await_call, max_waiters)
        drains = ledger.drains if ledger is not None else None
        self.drain = Drain(self.shards, self.clients, self.adapters.admission, drains, timings.shard_poll, clock)
        listed = ledger.listed() if ledger is not None else None
        members = agreement, self.shards, self.adapters, self.clients, start
        self.arrivals = Arrivals(*members, restarted, listed, timings.twin_wait, clock)
        self.arrivals.on_run = self.drain.settle
        parts = ResizedParts(self.nodes, self.shards, self.adapters, self.clients, self.arrivals, start)
        self.resize = Resize(parts, resize, timings, clock)

    @property
    def agreement(self) -> Agreement:
        """The settings that the serving shards share."""
        return self.arrivals.agreement

    def not_ready(self) -> str:
        """Return why /readyz says no; empty if it says yes."""
        if self.drain.reason:
            return self.drain.reason
        missing = self.agreement.layout.unserved(self.shards.missing())
        if missing:
            return f"shards not up: {missing}"
        if self.clients.world.reason:
            return self.clients.world.reason
        if not self.start.registered.is_set():
            done, total = self.start.progress
            return f"registering adapters: {done:,} of {total:,}" if total else "registering adapters"
        refused = [one for one in self.adapters.catalog.refusals.listed() if one.start_up] if self._require_all else ()
        named = "; ".join(f"{one.name!r} was refused: {one.reason}" for one in refused)
        return f"adapters refused: {named}" if named else ""

    @property
    def degraded(self) -> list[int]:
        """Return the shards that are down while their twins serve."""
        layout, missing = self.agreement.layout, self.shards.missing()
        unserved = layout.unserved(missing)
        return [shard for shard in missing if shard % layout.width not in unserved]

    def hear(self, handle: ShardHandle, report: pb.ShardReport) -> None:
        """Apply one report of a shard. Its reports come one at a time, in their order."""
        kind = report.WhichOneof("report")
        adapters = self.adapters
        if kind == "done":
            handle.commands.finish(report.done)
            if report.done.code:  # what waits for an adapter that cannot be loaded is refused
                adapters.admission.admit()
        elif kind == "stats":
            self.shards.update(handle, report.stats)
        elif kind == "residencies":
            is_serving = adapters.sync.hear(handle, report.residencies.moved)
            if is_serving and adapters.admission.queue.tickets.any_open:
                adapters.admission.admit(report.residencies.moved)
        elif kind == "leaving":
            handle.leaving = True
        elif kind == "client_gone":
            self.clients.gone(handle, report.client_gone.client, report.client_gone.epoch)
