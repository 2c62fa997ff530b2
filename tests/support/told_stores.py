"""Shards' weight stores as a controller's commands reach them: each by a thread of its own, as late as a seed says."""

from __future__ import annotations

import math
import random
import threading
import time
from types import SimpleNamespace

import torch

from lora_server.control.adapters.catalog import name_of
from lora_server.control.controller import Controller
from lora_server.control.members.agreement import Agreement
from lora_server.daemon.shard_commands import ShardCommands
from lora_server.daemon.shard_reports import ShardReports
from lora_server.placement import Layout, Placement
from lora_server.shard.coordination import Independent
from lora_server.transport.base import Port
from lora_server.wire import lora_server_pb2 as pb
from lora_server.wire.region import RegionLayout
from tests.support.serving import until
from tests.support.stores import cpu_store
from tests.support.workload import spec_of

SPEC, LAYOUT = spec_of("mixtral"), Layout.parse("ep2-pp2")
PLACEMENT = Placement(SPEC, LAYOUT)
MOST_SECONDS = 0.005  # that a command, or a layer, is late


class ToldStore:
    """One shard, without steps. `capacity` is its device pool's."""

    def __init__(self, controller: Controller, shard: int, capacity: int, seed: int) -> None:
        self._dice = random.Random(seed)
        self.store = cpu_store(PLACEMENT, shard, torch.float32, capacity, on_layer=self._layer)
        port, coordinator = Port(RegionLayout.for_model(SPEC, 16, 2, "exact")), Independent()
        reports = ShardReports(SimpleNamespace(store=self.store), port, coordinator, None, self._report)
        self.tell_moved, self._controller = reports.moved, controller
        self._commands = ShardCommands(False, port, self.store, coordinator, None, reports.moved, lambda: None)
        own = {"agreement_digest": controller.agreement.digest(), "pool_bytes": self.store.tier.pool.capacity}
        registration = pb.Registration(shard=shard, instance=f"{shard}-{seed}", **own)
        self.handle = controller.arrivals.arrive(registration, [])
        controller.shards.update(self.handle, pb.ShardStats())
        self.handle.heard = math.inf  # a slow test is not taken for a shard that is silent
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _report(self, report: pb.ShardReport) -> None:
        self._controller.hear(self.handle, report)

    def _layer(self, handle: int, left: int | None) -> None:
        self._late()
        self.tell_moved()

    def _late(self) -> None:
        time.sleep(self._dice.choice([0.0, 0.0, self._dice.random() * MOST_SECONDS]))

    def _run(self) -> None:
        for command in self.handle.commands:
            self._late()

            def done(error: Exception | None, number: int = command.id) -> None:
                code = getattr(error, "code", "") if error is not None else ""
                report = pb.ShardReport(done=pb.Done(command=number, code=code, message=str(error or "")))
                self._controller.hear(self.handle, report)

            self._commands.execute(command, done)

    def whole(self) -> set[int]:
        """Return the handles of adapters with all layers READY."""
        return set(self.store._table.complete)

    def is_idle(self, handles: set[int]) -> bool:
        """Whether it knows these alone, and has freed what it dropped: a layer that loads meanwhile is loaded first."""
        return self.store._table.entries.keys() == handles and not self.store._table.dropped

    def close(self) -> None:
        self._controller.arrivals.depart(self.handle)
        self._thread.join(10)
        self.store.close()


class ToldServer:
    """A controller and its stores."""

    def __init__(self, capacities: list[int], seed: int) -> None:
        agreement = Agreement(SPEC, LAYOUT, "float32", "independent", 16)
        self.controller, self._capacities, self._seed = Controller(agreement), capacities, seed
        self.stores = [self._store(shard) for shard in range(LAYOUT.num_shards)]

    def _store(self, shard: int) -> ToldStore:
        self._seed += 1
        return ToldStore(self.controller, shard, self._capacities[shard], self._seed)

    def restart(self, shard: int) -> None:
        """Restart a shard with empty memory."""
        self.stores[shard].close()
        self.stores[shard] = self._store(shard)

    def at_rest(self) -> dict[str, str]:
        """The state of each adapter, by name, when nothing loads any more, and nothing is left to decide."""

        def states() -> dict[str, str]:
            for store in self.stores:
                store.tell_moved()  # as a shard does twice a second
            return {one.record.name: one.state for one in self.controller.adapters.listings.all()}

        def rests() -> bool:
            handles = {one.record.handle for one in self.controller.adapters.listings.all()}
            idle = all(store.is_idle(handles) for store in self.stores)
            return idle and "loading" not in states().values() and self.controller.adapters.sync.prewarm.is_settled

        until(rests, "no shard loads")
        return states()

    def whole(self) -> list[set[str]]:
        """Names that each shard has all of."""
        catalog = self.controller.adapters.catalog
        return [{name_of(catalog, handle) for handle in store.whole()} for store in self.stores]

    def close(self) -> None:
        for store in self.stores:
            store.close()
