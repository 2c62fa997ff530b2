"""Speed of the planner's parts: min_cache_slots, a million simulated requests, whole plans."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable
from functools import partial

import numpy as np

from provisioning.iar import immediate_admissibility, min_cache_slots
from provisioning.plan.flags import PlanFlags
from provisioning.plan.scenario import scenario
from provisioning.report.result import answer
from provisioning.simulation.run import System, assign_greedily, run
from provisioning.workload.workload import Workload, zipf

SLO = "ttft_p95=250ms,tpot_avg=100ms"


def timed(what: str, call: Callable[[], object]) -> None:
    start, busy = time.perf_counter(), time.process_time()
    call()
    passed, used = time.perf_counter() - start, time.process_time() - busy
    print(f"{what:60} {passed:8.3f} s, {used:8.3f} s of a processor", flush=True)


def main() -> None:
    for num in (512, 100_000):
        for model in ("offered", "literal", "queued"):
            popularity = zipf(1.2, num)
            search = partial(min_cache_slots, popularity, num / 2, 0.95, model)
            timed(f"min_cache_slots N={num} LB={num // 2} {model}", search)
            tracemalloc.start()
            immediate_admissibility(popularity, num / 2, num // 8, model)
            print(f"{'  peak of one evaluation':60} {tracemalloc.get_traced_memory()[1] / 2**20:8.1f} MiB")
            tracemalloc.stop()
    for load in (1e4, 1e5, 1e6):
        for model in ("literal", "queued"):
            for skew in (0.6, 0.8, 1.0, 1.2, 1.6):
                search = partial(min_cache_slots, zipf(skew, 100_000), load, 0.95, model)
                timed(f"min_cache_slots N=100000 LB={load:g} s={skew} {model}", search)
    workload = Workload(popularity=zipf(1.0, 1000))
    requests = workload.sample(rate=9, num_requests=1_000_000, seed=0)
    system = System(
        instance_of=assign_greedily(workload.popularity, 4),
        step_s=np.linspace(0.08, 0.1, 65).tolist(),
        cache_slots=200,
        max_batch=64,
    )
    timed("1,000,000 requests, 1,000 adapters, 4 instances", lambda: run(requests, system))
    for model in ("gpt-oss-20b", "qwen3-30b-a3b", "mixtral-8x7b", "scaled-moe", "dbrx"):
        flags = PlanFlags(slo=SLO, model=model, adapters=512, instances=4, batch_size=64.0)
        timed(f"plan {model}, five seeds", lambda flags=flags: answer(scenario(flags), seeds=5))
        timed(f"plan {model}, model only", lambda flags=flags: answer(scenario(flags), seeds=0))
    flags = PlanFlags(
        slo=SLO, model="qwen3-30b-a3b", adapters=2000, zipf=0.6, instances=4, batch_size=64.0, burst_cv=12.0
    )
    timed("plan qwen3-30b-a3b, bursts of CV 12, refuted", lambda: answer(scenario(flags), seeds=5))
    flags = PlanFlags(slo=SLO, model="qwen3-30b-a3b", adapters=200, zipf=1.6, instances=6, batch_size=250.0)
    timed("plan qwen3-30b-a3b, below the model", lambda: answer(scenario(flags), seeds=5))


if __name__ == "__main__":
    main()
