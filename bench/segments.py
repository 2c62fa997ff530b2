"""Host time of a step on a GPU's shard, from its header to the kernels' table, which has all segments at once.

    python -m bench.segments [--json] [--rounds N]

Steps of 256 tokens at gate_up, written by the connector; 512 adapters of Zipf popularity, all READY, none loading.
There are no weights, since this code path reads none, and the staging buffer is ordinary memory. A round has each of
eight steps 25 times. Figures are medians, and for the total also the 10th percentile, which other work disturbs less:

    receive  header, handles, does any still load?      find   the blocks of all segments
    check    the rest of the request                    stage  the tables in the staging buffer
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench import harness
from bench.kernels.draws import NUM_DRAWS, draws
from bench.kernels.models import MODELS, NUM_ADAPTERS, Model
from client_connector.packing import Activations, HostPacker
from client_connector.routing import Batch, Run, route_experts
from lora_server.memory.entry import Source
from lora_server.memory.paged import PagedTier
from lora_server.memory.pages import PagePool
from lora_server.memory.store import WeightStore
from lora_server.placement import Layout, Placement
from lora_server.shard import request as requests
from lora_server.shard.compute import DeviceCompute
from lora_server.spec import PRESETS, ModelSpec, Site
from lora_server.transport.base import Grant, Port
from lora_server.transport.inproc import InprocLink
from lora_server.wire.messages import Hello
from lora_server.wire.region import RegionLayout
from lora_server.wire.terms import Held, Terms

TOKENS, DTYPE, LAYOUT = 256, torch.bfloat16, Layout(1, 1)
NAMES = ("mixtral-8x7b", "qwen3-30b-a3b")
PHASES = ("receive", "check", "find", "stage")
PASSES = 25  # over all steps, in a round
WARM_UP = 0.1
SITE = Site(0, "gate_up")


class Listed(WeightStore):
    """Adapters of one shape at one site, in the directory and nowhere else."""

    def __init__(self, model: Model, spec: ModelSpec) -> None:
        placement = Placement(spec, LAYOUT)
        self.table = PagedTier(placement, 0, DTYPE, PagePool(1, "cpu"))
        super().__init__(placement, 0, self.table)
        for handle in range(1, NUM_ADAPTERS + 1):
            self._list(handle, model)

    def _list(self, handle: int, model: Model) -> None:
        entry = self._table.add(handle, Source(Path(), "", ""))
        entry.footprint.size = 0
        entry.copies.ready.update(self._table.layers)
        self._table.complete.add(handle)
        shape, blocks_E2 = model.sites[0].shape, self.table.directory.absent(SITE)
        row = self.table.rows.add(0, shape)
        blocks_E2[:, 0], blocks_E2[:, 1] = row, np.arange(len(blocks_E2)) * shape.num_tiles
        self.table.directory.put(self.table.directory.allocate(handle), {SITE: blocks_E2})


class Case:
    """A shard with all adapters, and eight steps in the slots of one client."""

    def __init__(self, name: str) -> None:
        self.model, most = MODELS[name], TOKENS * MODELS[name].top_k
        self.spec = dataclasses.replace(PRESETS[name], layers=1, moe_layers=(0,))
        self.max_step_rows, self.client, self.epoch = most, 1, 1
        self.store = Listed(self.model, self.spec)
        self.compute = DeviceCompute(lambda *_: None, self.store.table.rows.table, self.spec, DTYPE, most)
        port = Port(RegionLayout.for_model(self.spec, most, NUM_DRAWS))
        port.grant(Grant(self.client, self.epoch, b""))
        port.hold(self.client, range(1, NUM_ADAPTERS + 1))
        self.link = InprocLink(port, Hello(self.client, self.epoch, b""), 0, lambda: False)
        self.seqs = range(1, NUM_DRAWS + 1)
        self.segments = [self._write(seq) for seq in self.seqs]

    def _write(self, seq: int) -> int:
        """Write a step's request into its slot and return its number of segments."""
        drawn = draws(self.model, TOKENS)[seq - 1]
        held_T = [Held(str(adapter), int(adapter) + 1, frozenset({SITE})) for adapter in drawn.adapters_T]
        batch = Batch.of([Run.of(held, row, 1) for row, held in enumerate(held_T)], decode=True)
        assert batch is not None
        owners_E = torch.zeros(self.spec.experts, dtype=torch.int64)
        experts_Tk = torch.from_numpy(drawn.experts_Tk.astype(np.int64))
        (message,) = route_experts(batch, experts_Tk, owners_E, self.max_step_rows)
        terms = Terms(self.client, self.epoch, Placement(self.spec, LAYOUT), "independent", self.max_step_rows)
        given = Activations(x=torch.randn(TOKENS, self.spec.hidden).to(DTYPE), decode=True)
        HostPacker(terms, SITE, given).write_request(self.link, seq, message, budget_us=1)
        return len(message.segments_S4)


def step(case: Case, memory: memoryview, seq: int) -> list[int]:
    """Handle a step as the shard's loop does; return the time after each phase."""
    times = [time.perf_counter_ns()]
    header = requests.read_header(memory, case.client, case.epoch, seq, case.max_step_rows)
    pins = case.store.pin(requests.handles(memory, header), header.layer, case.client, times[0])
    assert pins is not None, "all are READY"
    times.append(time.perf_counter_ns())
    request = requests.read_request(memory, header, case.spec, case.max_step_rows)
    times.append(time.perf_counter_ns())
    packed = case.store.gather(request.site, request.segments_S4, header.where)
    times.append(time.perf_counter_ns())
    case.compute._step(request, packed, case.link.rows.request(header))
    case.store.unpin(pins)
    times.append(time.perf_counter_ns())
    return times


def measure(name: str, rounds: int) -> dict[str, Any]:
    """Medians in microseconds, by phase."""
    case, spent = Case(name), list[np.ndarray]()
    for _ in harness.progress(range(rounds), name):
        for seq in [*case.seqs] * PASSES:
            spent.append(np.diff(step(case, case.link.region.request(seq), seq)))
    case.store.close()
    times_us = np.array(spent[int(len(spent) * WARM_UP) :]) / 1e3
    phases = zip(PHASES, np.median(times_us, axis=0).tolist(), strict=True)
    undisturbed, median = np.percentile(times_us.sum(axis=1), [10, 50]).tolist()
    row = {"model": name, "segments": statistics.median(case.segments), "p10_us": undisturbed, "total_us": median}
    return row | {f"{phase}_us": us for phase, us in phases}


def main() -> None:
    given = harness.flags(__doc__, rounds=5)
    harness.one_thread()
    rows = [measure(name, given.rounds) for name in NAMES]
    phases = " | ".join(f"{phase} {{{phase}_us:.1f}}" for phase in PHASES)
    columns = (
        f"model {{model}} | segments {{segments:,.0f}} | {phases} | all {{total_us:.1f}} | all, p10 {{p10_us:.1f}}"
    )
    title = f"From header to the kernels' table, {TOKENS} tokens, median us"
    harness.show(given, rows, harness.table(title, rows, columns))


if __name__ == "__main__":
    main()
