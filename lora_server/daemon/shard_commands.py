"""Carries out the controller's commands at a shard."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import structlog

from lora_server.daemon.stream import Done
from lora_server.daemon.world import ShardWorld
from lora_server.errors import LoraServerError
from lora_server.memory.entry import Source
from lora_server.memory.store import WeightStore
from lora_server.shard.coordination import StageRole
from lora_server.sources.fetch import NODE0
from lora_server.sources.urls import is_remote
from lora_server.timings import Timings
from lora_server.transport.base import Grant, Port
from lora_server.wire import lora_server_pb2 as pb

log = structlog.get_logger()


class ShardCommands:
    """Carries out commands on the parts of a shard process. One thread calls it, in the order of arrival."""

    def __init__(
        self,
        fetches: bool,
        port: Port,
        store: WeightStore,
        coordinator: StageRole,
        world: ShardWorld | None,
        moved: Callable[[], None],
        stop: Callable[[], None],
        step_seconds: float = Timings.expected_step,
    ) -> None:
        """`fetches`: adapters' files come from the controller, which may be on another host. `step_seconds` is added to
        a prefetch's deadline, so that adapters that block steps are loaded first."""
        self._step_seconds = step_seconds
        self._fetches, self._port, self._store = fetches, port, store
        self._coordinator, self._world, self._moved, self._stop = coordinator, world, moved, stop

    def execute(self, command: pb.ShardCommand, done: Done) -> None:
        """Carry a command out; call `done` when it has taken effect, or with its error."""
        kind = command.WhichOneof("command")
        if kind == "load":
            self._load(command.load, done)
            return
        if kind == "pin":
            self._store.adapters.keep_resident(command.pin, self._telling(done))
            return
        if kind == "bring":
            self._store.adapters.prewarm(command.bring, self._telling(done))
            return
        if kind == "grant":
            self._grant(command.grant)
        elif kind == "revoke":
            if self._world is not None:
                self._world.revoke(command.revoke)
            self._port.revoke(command.revoke)
            self._store.forget(command.revoke)
        elif kind == "drop":
            self._store.adapters.drop(command.drop)
        elif kind == "prefetch":
            self._prefetch(command.prefetch)
        elif kind == "uses":
            self._use(command.uses)
        elif kind == "borrow":
            self._port.borrow(command.borrow.client, command.borrow.holder)
        elif kind == "place" and self._world is not None:
            self._world.enter(command.place)
        elif kind == "note":
            self._store.adapters.relocate(command.note.handle, self._source(command.note))
            self._keep(command.note)
        elif kind == "follow":
            told = command.follow
            self._coordinator.follow(told.address, told.badge, told.certificate)
        done(None)
        if kind == "stop":
            self._stop()

    def _load(self, load: pb.Load, done: Done) -> None:
        size = load.size if load.HasField("size") else None
        self._store.adapters.load(load.handle, self._source(load), self._telling(done), load.eager, size, load.asked)
        self._keep(load)

    def _telling(self, done: Done) -> Done:
        """Wrap `done` so that changes of residency are reported before the outcome."""

        def told(error: LoraServerError | None) -> None:
            self._moved()
            done(error)

        return told

    def _source(self, load: pb.Load) -> Source:
        if is_remote(load.path):
            return Source(Path(), load.version, load.stamp, load.path)
        if load.sent and self._fetches:
            return Source(Path(), load.version, load.stamp, f"{NODE0}{load.path}")
        return Source(Path(load.path), load.version, load.stamp)

    def _keep(self, load: pb.Load) -> None:
        """Pin or unpin an adapter. The controller checked that it fits; an update may have made it larger since."""

        def kept(error: LoraServerError | None) -> None:
            if error is not None:
                log.error("a pinned adapter does not fit and can be evicted", handle=load.handle, error=str(error))

        if load.pinned:
            self._store.adapters.keep_resident(load.handle, kept)
        else:
            self._store.adapters.allow_eviction(load.handle)

    def _prefetch(self, asked: pb.Prefetch) -> None:
        """Prefetch for a client, so that its steps use the prefetch up."""
        now = time.monotonic()
        for need in asked.needs:
            self._store.prefetch([need.handle], asked.client, now + need.in_us * 1e-6 + self._step_seconds)
        self._store.forget(asked.client, {need.handle for need in asked.needs})

    def _use(self, uses: pb.Uses) -> None:
        for one in uses.holds:
            self._port.hold(one.client, one.more, one.fewer, one.anew)
        if uses.HasField("active"):
            active = uses.active
            self._store.adapters.set_active(active.more, active.fewer, active.anew, dict(active.trace))
            self._moved()

    def _grant(self, grant: pb.Grant) -> None:
        of_tenant = grant.tenant, grant.weight or 1.0
        given = Grant(grant.client, grant.epoch, grant.key, *of_tenant, grant.pe, grant.generation, grant.step_us)
        self._port.grant(given)
        if self._world is not None:
            self._world.grant(given)
