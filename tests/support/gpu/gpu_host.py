"""A shard of this process with a kernel that serves, and its clients, on this CPU (emulated_gpu) or on a real GPU."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

from bench.gpu_run.local_shard import LocalShard
from lora_server.placement import Layout, Placement
from lora_server.wire.slot import Wire
from tests.support.gpu.emulated_gpu import EmulatedGpu
from tests.support.gpu.gpu_steps import Steps
from tests.support.workload import spec_of


class Host(LocalShard):
    """A shard of the tiny Mixtral; serves until `close`."""

    def __init__(
        self, directory: Path, *, idle_ns=1_000_000_000, pages=4, wire: Wire = "exact", gpu=None, rows=16
    ) -> None:
        placement = Placement(spec_of("mixtral"), Layout.parse("ep1-pp1"))
        super().__init__(directory, gpu or EmulatedGpu(), placement, rows=rows, pages=pages, wire=wire, idle_ns=idle_ns)

    def join(self, handle: int) -> Steps:
        link = self.connect([handle])
        terms = SimpleNamespace(client=self.clients, epoch=1, spec=self.spec, wire=self.wire)
        return Steps(SimpleNamespace(links=[link], terms=terms), handle)

    def aim(self, steps: Steps, handle: int) -> None:
        self.port.hold(steps.terms.client, [handle])
        steps.handle = handle

    def peers(self) -> list:
        return [key.data for key in self.listener._selector.get_map().values() if hasattr(key.data, "mirror")]
