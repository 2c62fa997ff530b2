"""Figures 1, 6, 12b, 13b, 14, 16, 17 and 18 and Tables 1 and 4 of the paper, in simulation or by its models.

Assumptions beside those of `provision_setups`, written down before the first run:

1. Figure 1: Mixtral, 16 GPUs as 8 instances of 2, 4 of 4 or 2 of 8, without a LoRA Server; 512 adapters.
2. Figures 6, 12b, 13b: one run of 300 s, from 30 s to 270 s in steps of 5 s. An adapter is active from the admission of
   a request to its last token.
3. Figure 14: without overlap a step is the sum of its parts; without layer-wise loading a load is visible to the last
   byte of the fullest shard; without the kernels LoRA computes for twice as long, which is our guess, because the paper
   says nothing and no GPU was measured here.
4. Figure 17: NVLink as 3,600 Gb/s per GPU and direction in hosts of eight. The fixed costs of a message stay
   InfiniBand's, so the model can only show what bandwidth does.
5. Figure 18: Mixtral, four instances, both layouts with the slots of ep4-pp2.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from bench.provision_setups import CLUSTER, CONTEXT, TABLE_3, Setup, measure
from lora_server.placement import Layout
from lora_server.spec import PRESETS
from provisioning.arrays import Floats
from provisioning.model import memory, table1, table4
from provisioning.model.geometry import BF16, model_weight_bytes
from provisioning.model.latency import StepModel
from provisioning.simulation.run import SimulationResult, run
from provisioning.workload.workload import zipf

Rows = list[dict[str, object]]
MIXTRAL = "mixtral-8x7b"
NVLINK = replace(CLUSTER, link_gbps=3600.0, gpus_per_node=8)
SLOW_KERNELS = 2.0
TIMES = np.arange(30.0, 271.0, 5.0)


@dataclass(frozen=True, eq=False, kw_only=True)
class AblatedSetup(Setup):
    """A server without some of its optimisations."""

    overlaps: bool = True
    by_layer: bool = True
    kernel: float = 1.0  # times as long as the LoRA Server's

    def step_s(self, model: StepModel, batch: int) -> float:
        """Return a step's seconds."""
        if self.layout is None:
            return super().step_s(model, batch)
        lora, base = model.lora(batch, self.layout), model.base
        lora_us = lora.receive.value + self.kernel * lora.compute.value + lora.send.value
        ffn_us = base.ffn_us(batch).value
        layer_us = max(ffn_us, lora_us) if self.overlaps else ffn_us + lora_us
        own_us = self.spec.layers * (base.attention_us(batch).value + layer_us)
        return max(own_us, model.step_us(batch, self.layout, self.instances, self.eq6) * self.overlaps) * 1e-6

    def load_s(self, model: StepModel) -> float:
        """Return the seconds of a load that a request waits for."""
        if self.layout is None or self.by_layer:
            return super().load_s(model)
        shard_bytes = memory.fullest_shard_bytes(self.spec, self.layout, self.rank)
        return shard_bytes / self.cluster.host_bytes_per_us * 1e-6


def row(name: object, setup: Setup, rate: float) -> dict[str, object]:
    """Simulate a set-up; return its row."""
    found = measure(setup, rate)
    return {
        "case": name,
        "rate": round(rate, 2),
        "cache_slots": setup.cache_slots() * (1 if setup.layout else setup.instances),
        "ttft_p95_s": round(found.ttft_p95_s, 4),
        "tpot_ms": round(found.tpot_s * 1e3, 2),
        **{f"adapters_{int(level * 100)}": round(share, 4) for level, share in found.attainment.items()},
        "tokens_per_s": round(found.tokens_per_s),
    }


def scored(case: str, setup: Setup, rate: float, **more: object) -> dict[str, object]:
    """Simulate a set-up; return its row, without what the figures here do not show."""
    found = row(case, setup, rate)
    shown = ("case", "rate", "ttft_p95_s", "adapters_90", "tpot_ms", "tokens_per_s")
    return {**more, **{name: found[name] for name in shown}}


def figure_1a() -> Rows:
    """Compute what an instance's memory holds: weights, and how many adapters in half of the rest."""
    rows: Rows = []
    for model, (rank, gpus, _) in TABLE_3.items():
        spec, free = PRESETS[model], memory.instance_free_bytes(PRESETS[model], CLUSTER, gpus)
        rows.append(
            {
                "case": model,
                "weights_gb": round(model_weight_bytes(spec, BF16) / 1e9, 1),
                "adapter_gb": round(spec.adapter_bytes(rank) / 1e9, 3),
                "half_of_the_rest_gb": round(free / 2e9, 1),
                "adapters": memory.adapters_in(free / 2, spec, rank),
                "requests": memory.requests_in(free / 2, spec, CONTEXT),
            }
        )
    return rows


def figure_1b() -> Rows:
    """Simulate scale out against scale up, without a server."""
    shapes = ((8, 2), (4, 4), (2, 8))
    return [
        scored(f"{count} x {gpus} GPUs", Setup(model=MIXTRAL, instances=count, gpus=gpus), rate)
        for count, gpus in shapes
        for rate in (24.0, 48.0, 72.0, 96.0, 120.0)
    ]


def over_time(
    case: str, setup: Setup, rate: float, name: str, count: Callable[[SimulationResult, float], float]
) -> Rows:
    """Apply `count` to the outcome of one run at each of TIMES; return a row of each."""
    requests = setup.workload.sample(rate=rate, num_requests=math.ceil(rate * 300), seed=0)
    outcome = run(requests, setup.system())
    return [{"case": case, "time_s": float(time), name: count(outcome, float(time))} for time in TIMES]


def running(outcome: SimulationResult, time: float) -> float:
    """Count the requests that are admitted and not finished."""
    return float(_is_running(outcome, time).sum())


def active(outcome: SimulationResult, time: float) -> float:
    """Count the adapters of those requests."""
    return float(np.unique(outcome.requests.adapter[_is_running(outcome, time)]).size)


def _is_running(outcome: SimulationResult, time: float) -> Floats:
    return (outcome.admit_s <= time) & (outcome.finish_s > time)


def figure_6() -> Rows:
    """Simulate the batch of an instance over time, by cache ratio."""
    rows: Rows = []
    for ratio in (0.1, 0.2, 0.3, 0.4, 0.5):
        setup = Setup(model=MIXTRAL, instances=4, adapters=256, slots=max(int(256 * ratio / 4), 1))
        rows += over_time(f"{ratio:.0%}", setup, 48.0, "batch", lambda outcome, time: running(outcome, time) / 4)
    return rows


def figure_12b() -> Rows:
    """Simulate active adapters over time, by instances."""
    rows: Rows = []
    for instances in range(1, 7):
        setup = Setup(model=MIXTRAL, instances=instances, layout=Layout(4, 1))
        rows += over_time(f"{instances} instances", setup, 12.0 * instances, "active", active)
    return rows


def figure_13b() -> Rows:
    """Simulate active adapters over time, by layout; cases name its slots in brackets."""
    rows: Rows = []
    for layout in ("ep4-pp1", "ep2-pp3", "ep4-pp2"):
        setup = Setup(model="qwen3-30b-a3b", instances=4, layout=Layout.parse(layout))
        rows += over_time(f"{layout} ({setup.cache_slots()})", setup, 35.0, "active", active)
    return rows


def figure_14() -> Rows:
    """Simulate the ablation: 25 requests/s, 256 adapters, eight GPUs."""
    server = AblatedSetup(
        model=MIXTRAL, instances=3, layout=Layout(2, 1), adapters=256, slots=104,
        overlaps=False, by_layer=False, kernel=SLOW_KERNELS,
    )  # fmt: skip
    overlap = replace(server, overlaps=True)
    steps = {
        "S-LoRA": Setup(model=MIXTRAL, instances=4, adapters=256, slots=25),
        "+disagg": server,
        "+overlap": overlap,
        "+loading": replace(overlap, by_layer=True),
        "+kernel": replace(overlap, by_layer=True, kernel=1.0),
    }
    return [scored(name, setup, 25.0) for name, setup in steps.items()]


def figure_16() -> Rows:
    """Model the terms of a layer at a server of four GPUs, over the batch."""
    rows: Rows = []
    for model in (MIXTRAL, "scaled-moe"):
        rank, gpus, _ = TABLE_3[model]
        step = StepModel(
            spec=PRESETS[model], cluster=CLUSTER, popularity=zipf(1.2, 512), lora_rank=rank, instance_gpus=gpus,
            once_per_shard=False,
        )  # fmt: skip
        for batch in (16, 32, 64, 128, 256, 512, 1024):
            found = step.lora(batch, Layout(4, 1))
            for term in ("receive", "compute", "send"):
                rows.append({"model": model, "case": term, "batch": batch, "us": round(found.us(term), 1)})
    return rows


def figure_17() -> Rows:
    """Simulate NVLink against InfiniBand: 256 adapters, 30 requests/s, a server of two GPUs."""
    return [
        scored(
            name,
            Setup(model=MIXTRAL, instances=instances, layout=Layout(2, 1), adapters=256, cluster=cluster),
            30.0,
            instances=instances,
        )
        for name, cluster in (("InfiniBand", CLUSTER), ("NVLink", NVLINK))
        for instances in (1, 2, 3)
    ]


def figure_18() -> Rows:
    """Simulate two layouts with the same slots."""
    slots = Setup(model=MIXTRAL, instances=4, layout=Layout(4, 2)).cache_slots()
    return [
        scored(str(layout), Setup(model=MIXTRAL, instances=4, layout=layout, slots=slots), rate)
        for layout in (Layout(2, 4), Layout(4, 2))
        for rate in (20.0, 40.0, 60.0, 80.0, 100.0)
    ]


def figure_table1() -> Rows:
    """Compute Table 1 for Mixtral's batch of 128 on two GPUs, and a server of eight."""
    rows: Rows = []
    for name, strategy, x, y in (
        ("DP", "dp", 8, 1),
        ("PP", "pp", 1, 8),
        ("EP", "ep", 8, 1),
        ("EP4-PP2", "hybrid", 4, 2),
    ):
        found = table1.volumes(strategy, b=128, k=2, p=2, x=x, y=y)  # type: ignore[arg-type]
        rows.append({"case": name, **vars(found)})
    return rows


def figure_table4() -> Rows:
    """Compute Table 4 by the model, beside the paper's cells."""
    return [
        {"case": f"{one.layout}, batch {one.batch}", "term": one.column, "paper_us": one.paper_us,
         "us": round(one.model_us, 1)}
        for one in table4.residuals()
    ]  # fmt: skip


FIGURES: dict[str, Callable[[], Rows]] = {
    "1a": figure_1a,
    "1b": figure_1b,
    "6": figure_6,
    "12b": figure_12b,
    "13b": figure_13b,
    "14": figure_14,
    "16": figure_16,
    "17": figure_17,
    "18": figure_18,
    "table1": figure_table1,
    "table4": figure_table4,
}
