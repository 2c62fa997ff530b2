"""Admission as clients and shards meet it: the queue and the holds under one lock, and what drains behind them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from functools import partial
from typing import NamedTuple

import structlog

from lora_server.clock import SYSTEM, Clock
from lora_server.control.adapters.catalog import AdapterCatalog, name_of
from lora_server.control.adapters.records import Record
from lora_server.control.admission.capacity import PoolCapacity
from lora_server.control.admission.cut_offs import CutOffs, MergedIn
from lora_server.control.admission.holds import ClientHolds, HoldUpdates
from lora_server.control.admission.names import NamesInUse
from lora_server.control.admission.order import AdmissionOrder
from lora_server.control.admission.queue import AdapterLoading, AdmissionCounters, AdmissionQueue, QueuePosition
from lora_server.control.admission.table import TicketTable
from lora_server.control.admission.tally import Tally
from lora_server.control.admission.tickets import AdmissionClasses, TicketLoads
from lora_server.control.events.log import EventLog
from lora_server.control.members.shards import ShardHandle, SharedCommand
from lora_server.control.sync.shard_sync import ShardSync
from lora_server.control.sync.sizes import PoolSizes
from lora_server.errors import AdapterLoadError, ConfigError, LoraServerError, UnknownAdapterError, rebuild
from lora_server.slo import NO_CLASSES, SloClasses
from lora_server.timings import DEFAULTS, Timings
from lora_server.wire import lora_server_pb2 as pb


class AdmissionAnswer(NamedTuple):
    """The adapters that a client holds, or would: while `queued`, or while they load (`loading` seconds, infinity if
    that is unknown), the ticket has no answer yet."""

    records: list[Record]
    queued: QueuePosition | None = None
    loading: float | None = None


CheckInUse = Callable[[set[str]], None]  # of a tenant's names that clients hold, and those that any waits for; raises
MOST_NAMED = 5  # adapters of an error
log = structlog.get_logger()


class AdmissionService:
    """The admission of clients: holds, queue and capacity under one lock. Thread-safe.

    Its lock is taken before those of `ShardSync` and the catalog: a name is resolved and held in one step, so that no
    version is dropped in between. It never blocks, but for `wait_admitted` and `pause`, which release it meanwhile.
    """

    def __init__(
        self,
        catalog: AdapterCatalog,
        sync: ShardSync,
        most_active: int = 0,
        timings: Timings = DEFAULTS,
        clock: Clock = SYSTEM,
        classes: SloClasses = NO_CLASSES,
        events: EventLog | None = None,
        merged_in: MergedIn = lambda version: (),
    ) -> None:
        """`most_active`: see PoolCapacity; `merged_in`: see CutOffs."""
        self.classes = AdmissionClasses(classes, catalog.find)
        self._catalog, self._sync, self._clock = catalog, sync, clock
        self.tally = Tally(partial(name_of, catalog), clock.now)
        self._changed = threading.Condition(threading.RLock())  # holds, the queue, or what is held
        self._names = NamesInUse(partial(name_of, catalog))

        def changed(handle: int, more: int) -> None:
            self.tally.changed(handle, more)
            self._names.changed(handle, more)

        def tell(command: pb.ShardCommand) -> None:
            with sync.lock:
                sync.shards.tell(command)

        def seconds_left(handle: int) -> float:
            return sync.residency.seconds_left(handle)

        self.holds = ClientHolds(changed)
        self.queue = AdmissionQueue(
            partial(_resolve, catalog, sync),
            PoolCapacity(most_active, sync.sizes),
            self.holds,
            HoldUpdates(tell, self._changed),
            clock=clock.now,
            tickets=TicketTable(AdmissionOrder(timings.first_in_queue)),
            loads=TicketLoads(seconds_left, timings.loading),
            counters=AdmissionCounters(events or EventLog(clock)),
        )
        self.cut_offs = CutOffs(catalog, self.holds, clock, merged_in)

    # -- clients

    def acquire(
        self,
        client: int,
        names: Sequence[str],
        ticket: int = 0,
        tenant: str = "",
        weight: float = 1.0,
        check: CheckInUse | None = None,
        pace: float | None = None,
        slo_class: str = "",
    ) -> AdmissionAnswer:
        """Hold all of `names`, or be queued for them. `check` raises where no more may be in use; `pace`: see Ticket;
        `slo_class`: of adapters that have none of their own.

        Raises UnknownAdapterError, AdapterLoadError, AdmissionError, ServerUnavailableError.
        """
        with self._changed:
            self._catalog.start.require_settled()
            if check is not None:
                waiting = self.queue.tickets.waiting.wanted  # held as soon as there is capacity
                check(self._names.of(tenant) | waiting.of(tenant))
            told = set[int]()
            for found in filter(None, map(self._catalog.find, set(names))):
                if self._sync.require(found):
                    told.add(found.handle)
                elif self._sync.residency.error(found.handle, last_load=True):  # its files may be readable by now
                    self._sync.load(found, asked=True)
            answer = self.queue.acquire(client, ticket, names, tenant, weight, pace, self.classes.of(names, slo_class))
            if isinstance(answer, AdapterLoading):
                return AdmissionAnswer(_records(self._catalog, answer.handles), loading=answer.seconds)
            if not isinstance(answer, QueuePosition):
                return AdmissionAnswer(_records(self._catalog, answer))
            records = _records(self._catalog, self.queue.resolve(names))
            for record in records:
                if record.handle not in told and self._sync.sizes.unmeasured([record.handle]) is not None:
                    self._sync.load(record, asked=True)  # shards measure it before the others
            return AdmissionAnswer(records, queued=answer)

    def wait_admitted(self, client: int, tickets: Collection[int], seconds: float) -> list[int]:
        """Wait until one of these is answered, for at most `seconds`; return those that are."""

        def decided() -> list[int]:
            return [ticket for ticket in tickets if not self.queue.tickets.is_open((client, ticket))]

        with self._changed:
            return self._clock.wait_for(self._changed, decided, seconds)

    def settle(self, client: int, tickets: Iterable[int]) -> None:
        """Forget the tickets among these that were answered: the client has their answers."""
        with self._changed:
            self.queue.settle(client, tickets)

    def cancel(self, client: int, tickets: Collection[int]) -> None:
        """Take back what these asked for. Raises AdmissionError."""
        with self._changed:
            self.queue.cancel(client, tickets)
            self.collect()

    def release(self, client: int, handles: Iterable[int]) -> None:
        """Release holds of a client."""
        with self._changed:
            self.queue.release(client, handles)
            self.collect()

    def forget_client(self, client: int) -> None:
        """Remove a client that is gone, with all that it held or waited for."""
        with self._changed:
            self.queue.forget_client(client)
            self.collect()

    def restore(self, client: int, handles: Iterable[int]) -> None:
        """Take what a client of an earlier controller holds, without what was dropped meanwhile."""
        with self._changed:
            records = _records(self._catalog, handles)
            for record in records:
                self._sync.require(record)
            self.queue.restore(client, [record.handle for record in records])
            self.collect()

    # -- shards

    def introduce(self, handle: ShardHandle, presumed: Iterable[int] = ()) -> None:
        """Tell a shard that registered what is active and which client holds what. `presumed`: clients held these under
        an earlier controller; their places stay theirs until all of them have spoken."""
        with self._changed:
            self.holds.presume(presumed)
            self.queue.update()
            self.queue.updates.flush(now=True)
            active = pb.Active(more=sorted(self.queue.capacity.active), anew=True)
            handle.commands.tell(SharedCommand(pb.ShardCommand(uses=pb.Uses(active=active))))
            for client, held in self.holds.of_clients().items():
                holds = pb.Holds(client=client, more=held, anew=not self.holds.is_unknown(client))
                handle.commands.tell(SharedCommand(pb.ShardCommand(uses=pb.Uses(holds=[holds]))))
            waiting = dict.fromkeys(name for names in self.queue.tickets.waiting.names() for name in names)
            for record in filter(None, map(self._catalog.find, waiting)):
                self._sync.ask(handle, record)
            self.admit()

    def active(self) -> set[int]:
        """Return the handles that have a place: in use, or pinned."""
        with self._changed:
            return set(self.queue.capacity.active)

    def batches(self) -> list[frozenset[int]]:
        """Return what requests of the last hour wanted together."""
        with self._changed:
            return self.queue.last_batches()

    def unfit(self, sizes: PoolSizes, handles: Set[int], layout: str) -> ConfigError | None:
        """Return why these, and the pinned adapters, cannot have places together in the pools of `sizes`; None where
        they can."""
        with self._changed:
            capacity = PoolCapacity(sizes=sizes)
            capacity.pinned = self.queue.capacity.pinned
            if not (reason := capacity.too_large(handles)):
                return None
            names = sorted(filter(None, (name_of(self._catalog, handle) for handle in handles)))
        shown = ", ".join(names[:MOST_NAMED]) + (" and others" if len(names) > MOST_NAMED else "")
        return ConfigError(
            f"--layout: got {layout}, in which there is no place for {shown}: {reason}; the server serves on "
            "as it did: choose more shards, unpin adapters, or start it with a larger --device-pool"
        )

    def swap(self, other: ShardSync) -> str:
        """Admit by the pools of the other placement's shards from now on, and serve from these. Where what is in use by
        now is not measured there, or does not fit, return why, and change nothing."""
        with self._changed:
            active = self.active()
            if (shard := other.sizes.unmeasured(active)) is not None:
                return f"its shard {shard} has not measured an adapter that came into use"
            if reason := PoolCapacity(sizes=other.sizes).too_large(active):
                return reason
            self._sync.swap(other)
            self.queue.capacity.move_to(self._sync.sizes)
            self.admit()
        return ""

    def is_behind(self, shard: int) -> bool:
        """Return whether a shard still loads what is in use, and a twin of it has it."""
        with self._changed:
            return self._sync.residency.is_behind(shard, self.queue.capacity.active)

    def admit(self, moved: Sequence[pb.Residency] = ()) -> None:
        """Look at the tickets again. `moved`: a shard's report of what it loaded, measured or could not load."""
        failed = {one.handle: rebuild(one.error_code, one.error) for one in moved if one.error_code}
        with self._changed:
            answered = self.queue.answer(failed if moved else self._refused_loads())
            if answered or not moved or not self.queue.capacity.is_current:
                self.queue.admit()
                self._changed.notify_all()

    def _refused_loads(self) -> dict[int, LoraServerError]:
        """Return what admitted tickets wait for and a shard refused to load, and why."""
        awaited = {handle for ticket in self.queue.tickets.loading.values() for handle in ticket.handles or ()}
        errors = {handle: self._sync.residency.error(handle) for handle in awaited}
        return {handle: AdapterLoadError(error) for handle, error in errors.items() if error}

    # -- what drains

    def pause(self, reason: str, seconds: float) -> int:
        """Admit nothing for this reason, '' for none; return how many adapters are still held, after so long at most.

        A client that has not said what it holds counts as one.
        """

        def held() -> int:
            return len(self.holds.handles()) or int(self.holds.any_unknown())

        with self._changed:
            self.queue.paused = reason
            self.admit()
            if reason:
                self._clock.wait_for(self._changed, lambda: not held(), seconds)
            return held()

    def cut_off_at(self, deadlines: Mapping[int, float]) -> None:
        """Set when draining adapters are taken from their clients, by handle, in seconds since 1970. The first
        deadline of a handle stays."""
        with self._changed:
            self.cut_offs.begin(deadlines)

    def cut_off(self) -> None:
        """Take adapters that drain for too long from their clients, but not from those that keep them (see CutOffs).
        To be called about once a second."""
        with self._changed:
            over = self.cut_offs.over()
            for handle in over:
                if cut := self.queue.revoke(handle, self.cut_offs.keepers(handle)):
                    log.warning(
                        "adapter taken from clients", name=name_of(self._catalog, handle), handle=handle, clients=cut
                    )
            if over:
                self.collect()

    def tell_ended(self) -> None:
        """Tell shards what is out of use since they were last told of anything. To be called about once a second."""
        with self._changed:
            self.queue.updates.flush(now=True)

    def collect(self) -> None:
        """Drop what drains and no client holds or awaits any more, and admit what fits now. To be called after a
        change of the catalog."""
        with self._changed:
            pinned, draining = self._catalog.marks.pinned_and_draining()
            if pinned != self.queue.capacity.pinned:
                self.queue.capacity.set_pinned(pinned)
                self.queue.admit()
            self._changed.notify_all()
            for handle in self.cut_offs.unused(draining, self.queue.tickets.waiting.names()):
                self.cut_offs.forget(handle)
                self.queue.updates.flush(now=True)  # no shard drops what it is told of afterwards
                self._catalog.remove(handle)
                self.queue.capacity.forget(handle)
                self._sync.drop(handle)
                self.queue.answer({handle: UnknownAdapterError("it was removed while it loaded; add it again")})


def _resolve(catalog: AdapterCatalog, sync: ShardSync, names: Sequence[str]) -> list[int]:
    """Return the handles of names. Raises UnknownAdapterError, AdapterLoadError."""
    records = [catalog.named(name) for name in names]
    for record in records:
        if error := sync.residency.error(record.handle):
            raise AdapterLoadError(f"adapter {record.name!r}: {error}")
    return [record.handle for record in records]


def _records(catalog: AdapterCatalog, handles: Iterable[int]) -> list[Record]:
    return [record for handle in handles if (record := catalog.by_handle(handle)) is not None]
