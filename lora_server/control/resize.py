"""Resize: a server goes on in another layout, while it serves.

Each node starts its share of the shards of a second placement, while those of the first serve. The new ones register
with a table of their own, and load the adapters that are in use, then the others. Then the two placements swap places
in one step, and heartbeats tell the clients, which connect to the new shards under the lease that they have and change
over between two steps. The *other* placement is the one that does not serve: the new one until the swap, then the old
one. While there is one, its shards are sent every change of adapters and holds, so that either serves any client. The
registry has the new layout from the swap on. An error before it changes nothing.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Collection
from dataclasses import replace
from typing import NamedTuple

import structlog

from lora_server.clock import SYSTEM, Clock
from lora_server.control.adapters.server_adapters import ServerAdapters
from lora_server.control.arrivals import Arrivals
from lora_server.control.clients import Clients
from lora_server.control.events.log import EventLog
from lora_server.control.members.agreement import Agreement, require_work
from lora_server.control.members.nodes import NodeTable
from lora_server.control.members.shards import ShardTable
from lora_server.control.new_shards import NewShards
from lora_server.control.start import StartState
from lora_server.control.sync.shard_sync import ShardSync
from lora_server.errors import ConfigError, LoraServerError, ServerBusyError, ServerUnavailableError
from lora_server.placement import Layout
from lora_server.registry.layouts import Layouts, PlacedLayout
from lora_server.timings import DEFAULTS, Timings
from lora_server.wire import lora_server_pb2 as pb
from lora_server.wire.terms import Proof

LEAST_SECONDS, MOST_SECONDS = 1.0, 3600.0
OUTCOMES = ("done", "failed")
log = structlog.get_logger()


class ResizeSupport(NamedTuple):
    """Where the layout is stored, and why the server cannot be resized; empty: it can."""

    layouts: Layouts | None = None
    refusal: str = "this server's nodes follow no controller"


NO_RESIZE = ResizeSupport()


class ResizedParts(NamedTuple):
    """The parts of a controller that a resize touches."""

    nodes: NodeTable
    shards: ShardTable
    adapters: ServerAdapters
    clients: Clients
    arrivals: Arrivals
    start: StartState


class Resize:
    """Resizes a server, once at a time. Thread-safe."""

    def __init__(
        self,
        parts: ResizedParts,
        support: ResizeSupport,
        timings: Timings = DEFAULTS,
        clock: Clock = SYSTEM,
    ) -> None:
        self._parts, self._support, self._timings, self._clock = parts, support, timings, clock
        self._one = threading.Lock()
        self._progress = pb.ResizeStatus()
        self._generation = parts.shards.generation  # the highest that was ever tried
        self._patient_until = 0.0  # clients stay so long on shards that have what they hold, where the new ones do not
        self.outcomes: Counter[str] = Counter()

    def status(self) -> pb.ResizeStatus:
        """Return how far it is."""
        return self._progress

    def move_for(self, proof: Proof, generation: int) -> pb.Move | None:
        """Return the move of a client with steps by the placement of `generation`, to the shards that have what it
        holds; None while it stays, since some shard and its twins lack an adapter of these. It stays for `resize_warm`
        seconds at most: a step that waits for a load is better than a client that comes too late."""
        shards, adapters, leases = self._parts.shards, self._parts.adapters, self._parts.clients.leases
        if not 0 < generation < shards.generation:
            return None
        lease, holds = leases.proven(proof), adapters.admission.holds
        held = holds.of(proof.client) | holds.of(lease.holder if lease is not None else 0)
        held = held or adapters.admission.active()  # it may borrow, and have told an earlier controller so
        with adapters.sync.lock:  # placements swap under it
            layout, live = shards.layout, shards.live()
            down = {shard for shard in range(layout.num_shards) if shard not in live}
            lacking = down | self._lacking(held)
            if layout.unserved(lacking) and self._clock.now() > self._patient_until:
                lacking = down
            if layout.unserved(lacking):
                return None
            endpoints = [handle.registration.endpoint for shard, handle in live.items() if shard not in lacking]
            return pb.Move(generation=shards.generation, layout=str(layout), endpoints=endpoints)

    def _lacking(self, held: Collection[int]) -> set[int]:
        """Return the new shards that still load one of these adapters, where waiting helps: the old shards have all of
        it and no load of it failed here, or each of them has a twin with all of it."""
        sync, lacking = self._parts.adapters.sync, set[int]()
        for handle in held:
            lacks = sync.residency.lacking(handle)
            is_on_old = sync.other is not None and sync.other.state(handle) == "ready"
            is_coming = is_on_old and not sync.residency.error(handle, last_load=True)
            if is_coming or not sync.shards.layout.unserved(lacks):
                lacking.update(lacks)
        return lacking

    def run(self, layout: str, seconds: float) -> pb.ResizeReply:
        """Serve in another layout: wait up to `seconds` for its shards to be loaded, and as long again for the clients
        to move. A client that does not come in time loses its lease, and joins again.

        Raises ConfigError for a layout that cannot be had, and says what it needs, AdapterLoadError for an adapter that
        cannot be loaded there, ServerUnavailableError if its shards are lost or late, ServerBusyError. Then the server
        serves on as it did.
        """
        if not LEAST_SECONDS <= seconds <= MOST_SECONDS:
            raise ConfigError(f"--seconds: got {seconds:g}, expected {LEAST_SECONDS:g} to {MOST_SECONDS:g}")
        if not self._one.acquire(blocking=False):
            raise ServerBusyError(f"already resizing to {self._progress.layout}: wait for that to end")
        began = self._clock.now()
        self._progress = pb.ResizeStatus(state="starting", layout=layout)
        try:
            agreement = self._next(layout)
            log.info("resizing", layout=layout, generation=agreement.generation)
            self._change(agreement, began + seconds, seconds)
            moved, ended = self._move(agreement, seconds)
        except LoraServerError as error:
            self.outcomes["failed"] += 1
            log.error("not resized", layout=layout, serving=str(self._parts.shards.layout), reason=str(error))
            raise
        finally:
            self._progress = pb.ResizeStatus()
            self._one.release()
        self.outcomes["done"] += 1
        took = self._clock.now() - began
        log.info("resized", layout=layout, generation=agreement.generation, moved=moved, ended=ended, seconds=took)
        return pb.ResizeReply(generation=agreement.generation, moved=moved, ended=ended, seconds=took)

    def _next(self, layout: str) -> Agreement:
        """Return the agreement of the next placement. Raises ConfigError, ServerUnavailableError."""
        if self._support.refusal:
            raise ConfigError(f"--layout: got {layout}, and {self._support.refusal}: start it with that --layout")
        now = self._parts.arrivals.agreement
        self._generation += 1
        following = replace(now, layout=Layout.parse(layout, now.layout.replicas), generation=self._generation)
        if following.layout == now.layout:
            raise ConfigError(f"--layout: got {layout}, expected another than the server's own")
        require_work(following.placement)
        self._parts.shards.require_up()
        if not self._parts.start.registered.is_set():
            raise ServerUnavailableError("the server still registers adapters; try again")
        return following

    # -- until the new shards serve

    def _change(self, agreement: Agreement, deadline: float, seconds: float) -> None:
        """Start the shards of a placement, have them loaded, and serve from them. After an error they are stopped."""
        parts, now = self._parts, self._parts.arrivals.agreement
        new = NewShards(self._stage(agreement), agreement, parts.adapters, parts.nodes)
        try:
            parts.nodes.run({one.generation: str(one.layout) for one in (now, agreement)})
            warm_until = min(deadline, self._clock.now() + self._timings.resize_warm)
            self._load(new, warm_until, deadline, seconds)
            while reason := self._try_swap(new, now, seconds):
                if self._clock.now() > deadline:
                    raise ServerUnavailableError(
                        f"{agreement.layout} does not serve within {seconds:g} s: {reason}; the server serves on as it "
                        "did: try again, or give it longer with --seconds"
                    )
                self._clock.wait(threading.Event(), self._timings.shard_poll)
                self._load(new, warm_until, deadline, seconds)
        except BaseException:
            self._end_other()
            raise

    def _stage(self, agreement: Agreement) -> ShardSync:
        """Let shards of this placement register."""
        parts, sync, clock = self._parts, self._parts.adapters.sync, self._clock
        silence, generation = self._timings.shard_silence, agreement.generation
        table = ShardTable(agreement.layout, agreement.coordination, silence, clock, generation)
        about = parts.adapters.catalog, parts.start, agreement.placement, EventLog(clock)  # events tell what serves
        staged = ShardSync(table, *about, sync.lock)
        staged.sends, staged.other = sync.sends, sync
        with sync.lock:
            staged.spread.add(sync.spread.on_all)
            sync.other, parts.shards.other = staged, table
        parts.arrivals.other = agreement
        return staged

    def _end_other(self) -> None:
        """End the placement that does not serve."""
        parts = self._parts
        sync, serving = parts.adapters.sync, parts.arrivals.agreement
        parts.arrivals.other = None
        with sync.lock:
            parts.shards.other = sync.other = None
        parts.nodes.run({serving.generation: str(serving.layout)})

    def _load(self, new: NewShards, warm_until: float, deadline: float, seconds: float) -> None:
        """Wait until the new shards have what is in use, and until `warm_until` for what else fits them.

        Raises ConfigError where an adapter does not fit, or what is in use does not by the deadline, AdapterLoadError
        where one cannot be loaded, ServerUnavailableError if the shards are lost, or late.
        """
        layout, pause = new.agreement.layout, threading.Event()
        while True:
            if self._parts.shards.closed:
                raise ServerUnavailableError("the server is stopping")
            new.require_sound()
            missing, crowded = new.missing(), None
            self._note("starting", new.agreement, layout.num_shards - len(missing), layout.num_shards)
            if not missing:
                is_late = self._clock.now() > warm_until
                new.require_fit(is_late)
                crowded, (loaded, wanted) = new.crowded(), new.loaded()
                self._note("crowded" if crowded else "loading", new.agreement, loaded, wanted)
                if not crowded and not new.unchecked and loaded == wanted and (is_late or new.is_settled):
                    return
            if self._clock.now() > deadline:
                if crowded:
                    raise crowded
                done = f"{self._progress.state}: {self._progress.done} of {self._progress.total}"
                where = f"; not up are {self._parts.nodes.where(layout, missing)}" if missing else new.awaited()
                raise ServerUnavailableError(
                    f"{layout} was not ready within {seconds:g} s ({done}{where}); the server serves on as it did: see "
                    "the node's log, or give it longer with --seconds"
                )
            self._clock.wait(pause, self._timings.shard_poll)

    def _put(self, agreement: Agreement) -> None:
        if self._support.layouts is not None:
            self._support.layouts.put(PlacedLayout(str(agreement.layout), agreement.generation))

    def _try_swap(self, new: NewShards, before: Agreement, seconds: float) -> str:
        """Let the placements swap places, in the registry first. Returns why what is in use by now does not let them,
        or ''.

        Raises ServerUnavailableError if a new shard was lost meanwhile.
        """
        parts, agreement = self._parts, new.agreement
        self._put(agreement)
        with parts.arrivals.alone():
            try:
                new.require_up()
                self._patient_until = self._clock.now() + min(self._timings.resize_warm, seconds / 2)
                reason = parts.adapters.admission.swap(new.sync)
            except BaseException:
                self._put(before)
                raise
            if not reason:
                parts.arrivals.agreement, parts.arrivals.other = agreement, before
                for handle in parts.shards.live().values():
                    parts.clients.introduce_all(handle)
                    parts.adapters.admission.introduce(handle)
        if reason:
            self._put(before)
        else:
            log.info("serving from the new shards", layout=str(agreement.layout), generation=agreement.generation)
        return reason

    # -- afterwards

    def _move(self, agreement: Agreement, seconds: float) -> tuple[int, int]:
        """Wait for the clients, and end the placement before; return how many moved, and how many lost their lease."""
        deadline, pause = self._clock.now() + seconds, threading.Event()
        while True:
            leases = [lease for lease, _ in self._parts.clients.leases.silences()]
            behind, total = [one for one in leases if one.is_behind(agreement.generation)], len(leases)
            self._note("moving", agreement, total - len(behind), total)
            if not behind or self._clock.now() > deadline or self._parts.shards.closed:
                break
            self._clock.wait(pause, self._timings.shard_poll)
        for lease in behind:
            log.warning("client did not move in time: its lease ends", client=lease.client, instance=lease.instance)
            self._parts.clients.end(lease.client, lease.epoch)
        self._end_other()
        return total - len(behind), len(behind)

    def _note(self, state: str, agreement: Agreement, done: int, total: int) -> None:
        self._progress = pb.ResizeStatus(state=state, layout=str(agreement.layout), done=done, total=total)
