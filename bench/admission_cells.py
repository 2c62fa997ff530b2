"""The calls of bench.admission, and what is expected of them by `provision`'s models, its simulation, and the rule.

The rule is the server's own `AdmissionQueue` (lora_server/control/admission/queue.py) in virtual time, with nothing
around it.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lora_server.control.admission.capacity import PoolCapacity
from lora_server.control.admission.queue import AdmissionQueue
from provisioning.arrays import Floats
from provisioning.simulation.measure import WARM_UP_RESIDENCES, Estimate, measured
from provisioning.simulation.run import System, run
from provisioning.workload import traces
from provisioning.workload.requests import Requests
from provisioning.workload.workload import Workload, zipf

TICK_SECONDS = 0.001  # of a simulated token: holds are so many of these
TOKEN_SECONDS = 0.03  # of a real one
TRACES = {
    "azure conv": "AzureLLMInferenceTrace_conv_2023.csv",
    "azure code": "AzureLLMInferenceTrace_code_2023.csv",
    "mooncake": "mooncake_conversation_trace.jsonl",
    "servegen m-mid": "servegen/m-mid",
}
SKEW = 1.2
LONG_RUN, LONG_SEEDS = 6000, 5
BATCHES = 10


@dataclass(frozen=True, kw_only=True)
class Scale:
    """`load` requests in flight on average, if all are admitted, each for `hold_seconds` on average."""

    load: float = 24.0
    hold_seconds: float = 1.0
    seconds: float = 40.0

    @property
    def num_calls(self) -> int:
        return round(self.load / self.hold_seconds * self.seconds)


def workloads(directory: Path, adapters: int) -> dict[str, Workload]:
    """Load Poisson arrivals and the traces that exist; a trace that names no adapters gets them by a Zipf law."""
    found = {"poisson": Workload(popularity=zipf(SKEW, adapters))}
    drawn = traces.ZipfAdapters(num_adapters=adapters, skew=SKEW)
    for name, file in TRACES.items():
        if (directory / file).exists():
            found[name] = traces.load(directory / file, drawn)
    return found


def calls(workload: Workload, scale: Scale, num: int, seed: int) -> Requests:
    """Draw calls as `provision` does (provisioning/plan/judge.py), at the bench's scale; output tokens are ticks."""
    tokens_per_s = scale.load / scale.hold_seconds * workload.lengths.mean_tokens
    requests = workload.calls(tokens_per_s=tokens_per_s, num=num, seed=seed).part(slice(num))
    ticks = requests.output_tokens * (scale.hold_seconds / workload.lengths.mean_tokens / TICK_SECONDS)
    return Requests(
        arrival_s=requests.arrival_s - requests.arrival_s[0],
        adapter=requests.adapter,
        output_tokens=np.maximum(np.rint(ticks), 1).astype(np.int64),
        num_adapters=requests.num_adapters,
    )


def simulated(requests: Requests, slots: int) -> NDArray[np.bool_]:
    """Tell of each request whether `provision`'s simulation admits it at once."""
    system = System(instance_of=[0] * requests.num_adapters, step_s=[TICK_SECONDS], cache_slots=slots)
    return run(requests, system).immediate


def long_run(workload: Workload, scale: Scale, slots: int) -> Estimate:
    """Estimate the workload's rate of immediate admission by long simulations over several seeds."""
    rates = []
    for seed in range(LONG_SEEDS):
        requests = calls(workload, scale, LONG_RUN, seed)
        system = System(instance_of=[0] * requests.num_adapters, step_s=[TICK_SECONDS], cache_slots=slots)
        outcome = run(requests, system)
        rates.append(float(outcome.immediate[measured(outcome)].mean()))
    return Estimate.of(rates, top=1.0)


def by_rule(requests: Requests, slots: int, slower: float = 1.0) -> NDArray[np.bool_]:
    """Tell of each request whether the server's rule admits it at once, with all times `slower` by a factor."""
    now = 0.0
    admission = AdmissionQueue(lambda names: [int(name) for name in names], PoolCapacity(slots), clock=lambda: now)
    names = [str(adapter + 1) for adapter in requests.adapter]
    hold_s = (requests.output_tokens * TICK_SECONDS * slower).tolist()
    immediate = np.zeros(len(requests), dtype=bool)
    ends: list[tuple[float, int]] = []
    waiting: dict[int, None] = {}

    def begin(index: int) -> None:
        heapq.heappush(ends, (now + hold_s[index], index))
        admission.settle(1, [index + 1])

    for index, arrival in enumerate((requests.arrival_s * slower).tolist()):
        while ends and ends[0][0] <= arrival:
            now, ended = heapq.heappop(ends)
            admission.release(1, [int(names[ended])])
            for one in [one for one in waiting if not admission.tickets.is_open((1, one + 1))]:
                del waiting[one]
                begin(one)
        now = arrival
        if isinstance(admission.acquire(1, index + 1, [names[index]]), list):
            immediate[index] = True
            begin(index)
        else:
            waiting[index] = None
    return immediate


def settled(requests: Requests, scale: Scale) -> slice:
    """Return the part of the calls that comes after a warm-up, as `provision` defines it."""
    warm_s = min(WARM_UP_RESIDENCES * scale.hold_seconds, requests.span_s / 3)
    return slice(int(np.searchsorted(requests.arrival_s, warm_s)), len(requests))


def in_batches(values: Sequence[float] | Floats | NDArray[np.bool_], lowest: float = 0.0) -> Estimate:
    """Estimate the mean of a time series, with an interval by the means of consecutive batches."""
    means = [float(batch.mean()) - lowest for batch in np.array_split(np.asarray(values, dtype=float), BATCHES)]
    found = Estimate.of(means)
    return Estimate(mean=found.mean + lowest, low=found.low + lowest, high=found.high + lowest)
