"""A controller with a socket, so many places for adapters, and one shard, of which a test says what it has loaded."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from lora_server.control.adapters.records import Record
from lora_server.control.rpc.registration import Doorkeeper
from lora_server.control.rpc.server import ControlServer
from lora_server.timings import DEFAULTS, Timings
from lora_server.wire import lora_server_pb2 as pb
from tests.support.controllers import ToldShard, kept, make_controller, moved


class PlacedServer:
    """`names` are its adapters, of which `places` are active at a time; `handles` are theirs."""

    def __init__(
        self, stack: contextlib.ExitStack, names: Sequence[str], places: int, timings: Timings = DEFAULTS
    ) -> None:
        self.controller = make_controller(settled=False, most_active=places, timings=timings)
        self.shard = ToldShard(self.controller)
        self.handles = {name: handle for handle, name in enumerate(names, start=70_000)}
        sizes = self.controller.adapters.sync.sizes
        for name, handle in self.handles.items():
            self.controller.adapters.catalog.publish(Record.decode(kept(name, handle).record))
            sizes.set_size(handle, 0, 1)
        self.shard.handle.registration.pool_bytes = 1 << 20
        sizes.set_capacity(0, 1 << 20)
        control = ControlServer(self.controller, "127.0.0.1:0", Doorkeeper(""))
        stack.callback(lambda: control.close(0.2))
        stack.callback(self.shard.close)
        self.address = f"127.0.0.1:{control.port}"

    def held(self) -> dict[int, int]:
        """Return how often clients hold what."""
        holds = self.controller.adapters.admission.holds
        return {handle: holds.by_client(handle).total() for handle in holds.handles()}

    def report(self, seconds: dict[str, float]) -> None:
        """Have the shard report how long it still loads these adapters; 0: they are loaded."""
        layers = self.controller.agreement.spec.layers
        reports = [
            pb.Residency(handle=self.handles[name], layers=0 if left else layers, expected_us=round(left * 1e6))
            for name, left in seconds.items()
        ]
        moved(self.controller, self.shard.handle, reports)
