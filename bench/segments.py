"""Host time of a step on a GPU's shard, from its header to the kernels' table: segments at once, and one by one.

    python -m bench.segments [--json] [--rounds N]

Steps of 256 tokens at gate_up, written by the connector; 512 adapters of Zipf popularity, all READY, none loading.
There are no weights, since this code path reads none, and the staging buffer is ordinary memory. "one by one" does the
same with Python objects per segment. The two take turns over eight steps, 25 times, and must agree. Figures are
medians, and for the total also the 10th percentile, which other work on the machine disturbs less:

    receive  header, handles, does any still load?      find   the blocks of all segments
    check    the rest of the request                    stage  the tables in the staging buffer
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from bench import harness
from bench.kernels.draws import NUM_DRAWS, draws
from bench.kernels.models import MODELS, NUM_ADAPTERS, Model
from client_connector.packing import Activations, HostPacker
from client_connector.routing import Batch, Run, route_experts
from kernels_cuda.tables import PackedSegments
from lora_server.errors import UnknownAdapterError
from lora_server.memory.entry import LayerState, Source
from lora_server.memory.paged import PagedTier
from lora_server.memory.pages import PagePool
from lora_server.memory.store import WeightStore
from lora_server.placement import Layout, Placement
from lora_server.shard import request as requests
from lora_server.shard.compute import DeviceCompute
from lora_server.spec import PRESETS, ModelSpec, Site
from lora_server.transport.base import Grant, Port
from lora_server.transport.inproc import InprocLink
from lora_server.wire import slot
from lora_server.wire.messages import Hello
from lora_server.wire.region import RegionLayout
from lora_server.wire.terms import Held, Terms

TOKENS, DTYPE, LAYOUT = 256, torch.bfloat16, Layout(1, 1)
NAMES = ("mixtral-8x7b", "qwen3-30b-a3b")
PHASES = ("receive", "check", "find", "stage")
PASSES = 25  # over all steps, before it is the other way's turn
WARM_UP = 0.1
SITE = Site(0, "gate_up")


class Packed(NamedTuple):
    row: int
    first_tile: int
    max_rank: int


class Segment(NamedTuple):
    block: Packed
    first: int
    num_entries: int


class Listed(WeightStore):
    """Adapters of one shape at one site, in the directory and nowhere else; `blocks` says the same in Python."""

    def __init__(self, model: Model, spec: ModelSpec) -> None:
        placement = Placement(spec, LAYOUT)
        self.table = PagedTier(placement, 0, DTYPE, PagePool(1, "cpu"))
        self.blocks = dict[tuple[int, int], Packed]()
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
        for expert in range(len(blocks_E2)):
            self.blocks[handle, expert] = Packed(row, expert * shape.num_tiles, shape.groups * 16)

    def is_ready(self, handle: int, layer: int) -> bool:
        """One by one, a segment's state is looked up like this."""
        return self.report.state(handle, layer) is LayerState.READY


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


def at_once(case: Case, memory: memoryview, seq: int) -> tuple[list[int], torch.Tensor]:
    """Handle a step as the shard's loop does. Returns the time after each phase, and the kernels' table."""
    times = [time.perf_counter_ns()]
    header = requests.read_header(memory, case.client, case.epoch, seq, case.max_step_rows)
    pins = case.store.pin(requests.handles(memory, header), header.layer, case.client, times[0])
    assert pins is not None, "all are READY"
    times.append(time.perf_counter_ns())
    request = requests.read_request(memory, header, case.spec, case.max_step_rows)
    times.append(time.perf_counter_ns())
    packed = case.store.gather(request.site, request.segments_S4, header.where)
    times.append(time.perf_counter_ns())
    step = case.compute._step(request, packed, case.link.rows.request(header))
    case.store.unpin(pins)
    times.append(time.perf_counter_ns())
    return times, step.segments


def one_by_one(case: Case, memory: memoryview, seq: int) -> tuple[list[int], torch.Tensor]:
    """Handle a step with a list, a Segment and a tuple per segment. Returns the same as `at_once`."""
    times = [time.perf_counter_ns()]
    header = requests.read_header(memory, case.client, case.epoch, seq, case.max_step_rows)
    for handle in frozenset(requests._segments(memory, slot.HEADER_BYTES, header.num_segments)[:, 0].tolist()):
        assert case.store.is_ready(handle, header.layer)
    times.append(time.perf_counter_ns())
    few, requests.FEW_SEGMENTS = requests.FEW_SEGMENTS, header.num_segments  # so that its loop checks all of them
    request = requests.read_request(memory, header, case.spec, case.max_step_rows)
    requests.FEW_SEGMENTS = few
    times.append(time.perf_counter_ns())
    segments = [_segment(case.store, request, *segment) for segment in request.segments_S4.tolist()]
    max_rank = max(segment.block.max_rank for segment in segments)
    rows = [(block.row, block.first_tile, first, entries) for block, first, entries in segments]
    packed = PackedSegments(torch.tensor(rows, dtype=torch.int32).numpy(), max_rank)
    times.append(time.perf_counter_ns())
    step = case.compute._step(request, packed, case.link.rows.request(header))
    times.append(time.perf_counter_ns())
    return times, step.segments


def _segment(
    store: Listed, request: requests.Request, handle: int, expert: int, first: int, num_entries: int
) -> Segment:
    if not store.is_ready(handle, request.site.layer):
        raise UnknownAdapterError(f"{request.header.where}: handle {handle}")
    return Segment(store.blocks[handle, expert], first, num_entries)


Way = Callable[[Case, memoryview, int], tuple[list[int], torch.Tensor]]
WAYS: dict[str, Way] = {"one by one": one_by_one, "at once": at_once}


def measure(name: str, rounds: int) -> dict[str, Any]:
    """Medians of both ways, in microseconds by phase."""
    case = Case(name)
    spent: dict[str, list[np.ndarray]] = {way: [] for way in WAYS}
    for _ in harness.progress(range(rounds), name):
        tables: dict[str, list[torch.Tensor]] = {}
        for way, run in WAYS.items():
            for seq in [*case.seqs] * PASSES:
                times, table = run(case, case.link.region.request(seq), seq)
                spent[way].append(np.diff(times))
                tables.setdefault(way, []).append(table.clone())
        assert all(map(torch.equal, *tables.values())), "both ways are the same steps"
    case.store.close()
    row: dict[str, Any] = {"model": name, "segments": statistics.median(case.segments)}
    for way, all_times in spent.items():
        times_us = np.array(all_times[int(len(all_times) * WARM_UP) :]) / 1e3
        phases = dict(zip(PHASES, np.median(times_us, axis=0).tolist(), strict=True))
        undisturbed, median = np.percentile(times_us.sum(axis=1), [10, 50]).tolist()
        row[way] = {"p10_us": undisturbed, "total_us": median, **{f"{p}_us": us for p, us in phases.items()}}
    row["ratio"] = row["one by one"]["total_us"] / row["at once"]["total_us"]
    return row


def main() -> None:
    given = harness.flags(__doc__, rounds=5)
    harness.one_thread()
    rows = [measure(name, given.rounds) for name in NAMES]
    lines = [{**row, "way": way, **row[way]} for row in rows for way in WAYS]
    phases = " | ".join(f"{phase} {{{phase}_us:.1f}}" for phase in PHASES)
    columns = "model {model} | segments {segments:,.0f} | way {way} | " + phases
    columns += " | all {total_us:.1f} | all, p10 {p10_us:.1f} | one by one / at once {ratio:.1f}"
    title = f"From header to the kernels' table, {TOKENS} tokens, median us"
    harness.show(given, rows, harness.table(title, lines, columns))


if __name__ == "__main__":
    main()
