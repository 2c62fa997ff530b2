"""The paper's serving set-ups as simulations. ASSUMPTIONS is the list that `paper_figures` prints.

It was written, and committed, before the figures were first run, and is not tuned to their outcome.
What was added later (per stage in 4, 11, 12, and the layouts of Figure 12) was committed before it was run, too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np

from lora_server.placement import Layout
from lora_server.spec import PRESETS, ModelSpec
from provisioning.model import memory
from provisioning.model.hardware import GPUS, Cluster
from provisioning.model.latency import Eq6, StepModel
from provisioning.simulation.measure import adapters_within
from provisioning.simulation.run import SimulationResult, System, assign_greedily, run
from provisioning.workload.requests import Lengths
from provisioning.workload.workload import Workload, zipf

ASSUMPTIONS = """\
From the paper: 16 GPUs of 96 GB and 4.0 TB/s in hosts of four (GPT-OSS-20B: 8 GPUs), one 400 Gb/s NIC each; Table 3's
models, ranks and GPUs per instance; 512 adapters, Zipf 1.2, Poisson arrivals; SLOs TTFT p95 0.25 s, mean TPOT 0.1 s;
S-LoRA holds adapters in 50 % of the memory that the weights leave and KV cache in the rest, "less LoRA" in 40 %;
adapters are split over instances greedily; half of the GPUs are the LoRA Server (8 of 16, 4 of 8), EP4-PPy.
Ours, where it is silent:
1. Output lengths: log-normal, mean 211 tokens, CV 0.77 (those of Azure's 2023 conversations; BurstGPT is not here).
2. Context: 1,024 tokens per request, for KV cache size and attention time.
3. Decode steps take what `provisioning.model.latency` models on its `hopper-96`,
   with constants from Table 4 (one model).
   S-LoRA's kernels are as fast as the LoRA Server's, and run after the base GEMM; its LoRA is spread over the instance.
4. The LoRA Server sends rows as in the paper, one per expert. A step takes at least what a stage needs for L instances:
   L times the longest term, times ceil(layers / y) layers ("per stage"), or times all layers (Eq. 6 "as printed").
5. GPU memory usable for weights, adapters and KV cache: 92 % of 95.6 GiB. Adapters have an own A for gate and up.
6. A batch is limited by KV memory and by the largest size whose step meets the TPOT SLO.
7. Cold adapters: S-LoRA loads a whole one over PCIe (50 GB/s per GPU of the instance), other requests go on meanwhile;
   the LoRA Server shows layer 0, or what the load takes longer than a step; prefetch signals are not counted on.
8. A run is 300 s of arrivals; requests that arrive from 30 s to 270 s are measured; means of 5 seeds.
9. Serviceable rate: the largest that meets both SLOs, by bisection to 2 %.
10. Figure 5: 12 requests/s per instance (as Figure 12). Figure 13: layouts ep4-pp1, ep2-pp3, ep2-pp4, ep4-pp2, ep8-pp1.
    Figure 15: s in 0.9, 1.2, 1.5; four instances beside the server whatever its size; S-LoRA has eight.
    Figure 12: ep4-pp1, and ep2-pp2 beside it, since the paper names no layout of its four GPUs.
11. "S-LoRA, tuned" holds adapters in that share of the memory, of 40, 60, 70, 80, 90 and 95 %, with which its
    serviceable rate is the highest (two seeds); its rate is then measured like the others'.
12. "Any instance": requests go to the instance with the fewest, since every engine reaches every adapter. All others
    assign adapters to instances, as the paper does."""

TTFT_S, TPOT_S, SEEDS = 0.25, 0.1, 5
CLUSTER = Cluster(gpu=GPUS["hopper-96"], gpus_per_node=4)
LENGTHS = Lengths(mean_tokens=211, cv=0.77)
CONTEXT = 1024
SHARES = (0.4, 0.6, 0.7, 0.8, 0.9, 0.95)
TABLE_3 = {  # model: (rank, GPUs per instance, GPUs in all)
    "gpt-oss-20b-paper": (64, 1, 8),
    "qwen3-30b-a3b": (32, 2, 16),
    "mixtral-8x7b": (64, 2, 16),
    "scaled-moe": (64, 4, 16),
    "dbrx": (64, 4, 16),
}


@dataclass(frozen=True, eq=False, kw_only=True)
class Setup:
    """One system under one popularity. `layout` None means coupled."""

    model: str
    instances: int
    layout: Layout | None = None
    adapters: int = 512
    skew: float = 1.2
    lora_share: float = 0.5
    order: str = "fcfs"
    slots: int | None = None
    eq6: Eq6 = "stage"
    any_instance: bool = False
    gpus: int = 0  # of an instance; 0: Table 3's
    cluster: Cluster = CLUSTER
    workload: Workload = field(init=False)

    def __post_init__(self) -> None:
        workload = Workload(popularity=zipf(self.skew, self.adapters), lengths=LENGTHS)
        object.__setattr__(self, "workload", workload)

    @property
    def spec(self) -> ModelSpec:
        return PRESETS[self.model]

    @property
    def rank(self) -> int:
        return TABLE_3[self.model][0]

    @property
    def instance_gpus(self) -> int:
        return self.gpus or TABLE_3[self.model][1]

    def cache_slots(self) -> int:
        if self.slots is not None:
            return self.slots
        if self.layout is not None:
            return memory.cache_slots(self.spec, self.layout, self.cluster, self.rank)
        return memory.adapters_in(self.lora_share * self.free_bytes, self.spec, self.rank)

    @property
    def free_bytes(self) -> float:
        return memory.instance_free_bytes(self.spec, self.cluster, self.instance_gpus)

    def system(self) -> System:
        model = StepModel(
            spec=self.spec,
            cluster=self.cluster,
            popularity=self.workload.popularity,
            lora_rank=self.rank,
            instance_gpus=self.instance_gpus,
            context_tokens=CONTEXT,
            once_per_shard=False,
        )
        kv_share = 1.0 if self.layout is not None else 1 - self.lora_share
        kv_batch = memory.requests_in(kv_share * self.free_bytes, self.spec, CONTEXT)
        most = min(kv_batch, 2048)
        grid = np.unique(np.geomspace(1, max(most, 2), 48).astype(int))
        steps = np.interp(np.arange(most + 1), grid, [self.step_s(model, int(batch)) for batch in grid])
        max_batch = max(int(np.searchsorted(steps, TPOT_S, side="right")) - 1, 1)
        return System(
            instance_of=None if self.any_instance else assign_greedily(self.workload.popularity, self.instances),
            instances=self.instances,
            step_s=steps[: max_batch + 1].tolist(),
            cache_slots=min(self.cache_slots(), self.adapters),
            shared=self.layout is not None,
            max_batch=max_batch,
            load_s=self.load_s(model),
            order="sjf" if self.order == "sjf" else "fcfs",
        )

    def step_s(self, model: StepModel, batch: int) -> float:
        if self.layout is None:
            return model.coupled_step_us(batch) * 1e-6
        return model.step_us(batch, self.layout, self.instances, self.eq6) * 1e-6

    def load_s(self, model: StepModel) -> float:
        whole = self.spec.adapter_bytes(self.rank)
        if self.layout is None:
            return whole / (self.instance_gpus * self.cluster.host_bytes_per_us) * 1e-6
        rate = self.cluster.host_bytes_per_us
        first_us = whole / self.spec.layers / (self.layout.ep * rate)
        shard_us = memory.fullest_shard_bytes(self.spec, self.layout, self.rank) / rate
        return max(first_us, shard_us - model.step_us(1, self.layout)) * 1e-6


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Means over seeds."""

    ttft_p95_s: float
    tpot_s: float
    attainment: dict[float, float]
    tokens_per_s: float

    @property
    def meets(self) -> bool:
        return self.ttft_p95_s <= TTFT_S and self.tpot_s <= TPOT_S


def measure(setup: Setup, rate: float, seeds: int = SEEDS) -> Measured:
    """300 s at a rate, the middle 240 measured."""
    system, rows = setup.system(), []
    for seed in range(seeds):
        requests = setup.workload.sample(rate=rate, num_requests=math.ceil(rate * 300), seed=seed)
        rows.append(_one(run(requests, system)))
    levels = {level: float(np.mean([row[2][level] for row in rows])) for level in (0.5, 0.8, 0.9)}
    return Measured(
        ttft_p95_s=float(np.mean([row[0] for row in rows])),
        tpot_s=float(np.mean([row[1] for row in rows])),
        attainment=levels,
        tokens_per_s=float(np.mean([row[3] for row in rows])),
    )


def _one(outcome: SimulationResult) -> tuple[float, float, dict[float, float], float]:
    requests = outcome.requests
    kept = slice(*np.searchsorted(requests.arrival_s, (30, 270)))
    tokens = requests.output_tokens[kept]
    several = tokens > 1
    decode_s = (outcome.finish_s - outcome.first_token_s)[kept]
    tpot_s = float((decode_s[several] / (tokens[several] - 1)).mean())
    levels = {level: adapters_within(outcome, kept, TTFT_S, level) for level in (0.5, 0.8, 0.9)}
    finished = (outcome.finish_s >= 30) & (outcome.finish_s < 270)
    throughput = float(requests.output_tokens[finished].sum() / 240)
    return float(np.percentile(outcome.ttft_s[kept], 95)), tpot_s, levels, throughput


def tuned(setup: Setup, about: float) -> Setup:
    """S-LoRA with the share of SHARES that serves most; `about` is a rate near what it may reach."""
    found = [replace(setup, lora_share=share) for share in SHARES]
    rates = [serviceable_rate(item, seeds=2, about=about) for item in found]
    return found[max(range(len(found)), key=rates.__getitem__)]


def serviceable_rate(setup: Setup, seeds: int = SEEDS, about: float = 0.25) -> float:
    """The largest rate that meets both SLOs, to 2 %, sought from `about` on; 0 if not even 0.25 requests/s do."""
    low, high = 0.0, about
    while high > 0.25 and not measure(setup, high, seeds).meets:
        high /= 2
    while measure(setup, high, seeds).meets:
        low, high = high, high * 2
        if high > 4096:
            return low
    while low > 0 and high / low > 1.02:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if measure(setup, middle, seeds).meets else (low, middle)
    return low
