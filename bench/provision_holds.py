"""Does what is planned hold? Two tables, as Markdown, with seeds that nothing was tuned with.

    python -m bench.provision_holds [--traces DIR] [--quick] [--out FILE]

Stationary: at the smallest M with `offered` >= the target (0.95, 0.97, 0.99), the model's IAR beside the simulated
one; the bar is 1.5 points where the model says 0.95 or more. Replayed: plans for traces (made ones of five kinds, and
Azure's and Mooncake's in DIR, where adapters that a trace does not name are drawn), each replayed as it is at the load
that was planned for, without the planner's windows and rotations; and the plan of a trace's first half, with the second
half at that load.
"""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from bench import harness, provision_iar
from provisioning.iar.models import offered_curve
from provisioning.plan.candidates import Candidate
from provisioning.plan.choice import smallest
from provisioning.plan.flags import PlanFlags
from provisioning.plan.scenario import scenario
from provisioning.plan.verify import disaggregated, verify
from provisioning.simulation.run import run
from provisioning.workload.requests import Requests
from provisioning.workload.traces import ZipfAdapters
from provisioning.workload.traces import load as load_trace
from provisioning.workload.workload import zipf
from tests.support.provision import KINDS, write

BAR = 0.015
TARGETS = (0.95, 0.97, 0.99)
LOAD, TARGET = 256.0, 0.95
SLO = "ttft_p95=250ms,tpot_avg=100ms"


def stationary(quick: bool) -> Iterator[tuple[Any, ...]]:
    """(N, s, LB, M, model, simulated, error) of every cell."""
    grid = itertools.product((150, 400, 900), (0.3, 0.7, 0.9, 1.1, 1.4), (60.0, 250.0, 900.0))
    for num, skew, load in list(grid)[:: 9 if quick else 1]:
        popularity = zipf(skew, num)
        curve = offered_curve(popularity, load)
        for target in TARGETS:
            slots = int(np.argmax(curve >= target))
            seen = provision_iar.simulated(popularity, load, slots, seeds=range(700, 705), top=1.0)
            yield num, skew, load, slots, float(curve[slots]), seen, float(curve[slots]) - seen.mean


def planned(trace: Path, seed: int, **adapters: Any) -> Candidate | None:
    flags = PlanFlags(slo=SLO, model="qwen3-30b-a3b", lora_rank=32, gpu="hopper-96", trace=trace, seed=seed, **adapters)
    asked = scenario(replace(flags, instances=4, batch_size=LOAD / 4))
    return verify(asked, smallest(asked), 5).choice.chosen


def replayed(chosen: Candidate, calls: Requests) -> tuple[float, float]:
    """(admitted at once, within the TTFT SLO) of calls at LB in flight on average, as they are."""
    step_s = chosen.mean_step_us * 1e-6
    slower = float(calls.output_tokens.sum()) * step_s / (calls.span_s * LOAD)
    outcome = run(calls.slowed(slower), disaggregated(chosen))
    in_time = outcome.ttft_s <= chosen.scenario.slo.ttft_us * 1e-6
    return float(outcome.immediate.mean()), float(in_time.mean())


def traces(directory: Path, work: Path, quick: bool) -> Iterator[tuple[str, Path, int, dict[str, Any]]]:
    """(name, file, seed, what draws its adapters)."""
    for kind, seed in itertools.product(KINDS, (911,) if quick else (911, 912, 913)):
        yield f"{kind}, seed {seed}", write(work / f"{kind}-{seed}.csv", kind, seed), seed, {}
    real = (
        "AzureLLMInferenceTrace_conv_2023.csv",
        "AzureLLMInferenceTrace_code_2023.csv",
        "mooncake_conversation_trace.jsonl",
    )
    for name, (num, skew, seed) in itertools.product(real, ((400, 0.9, 921), (150, 1.3, 922))):
        if (directory / name).exists():
            short = re.sub("LLMInferenceTrace|_2023|_trace", "", Path(name).stem)
            yield f"{short}, {num} adapters, Zipf {skew}", directory / name, seed, {"adapters": num, "zipf": skew}


def line(name: str, chosen: Candidate | None, calls: Requests | None) -> str:
    """Hold a plan against calls."""
    if chosen is None or calls is None:
        return f"| {name} | no plan | | | |"
    admitted, in_time = replayed(chosen, calls)
    held = "yes" if min(admitted, in_time) >= TARGET else "**no**"
    return f"| {name} | {chosen.gpus} | {chosen.slots} | {admitted:.4f}, {in_time:.4f} | {held} |"


def row(name: str, file: Path, seed: int, adapters: dict[str, Any]) -> str:
    calls = load_trace(
        file, ZipfAdapters(num_adapters=adapters.get("adapters", 1), skew=adapters.get("zipf", 0), seed=seed)
    ).trace
    assert calls is not None
    return line(name, planned(file, seed, **adapters), calls)


def halves(name: str, kind: str, seed: int, work: Path) -> str:
    """A line of the third: planned by the first half of the time, replayed with the second."""
    lines = write(work / f"whole-{kind}-{seed}.csv", kind, seed, num=30_000).read_text().splitlines(keepends=True)
    half = len(lines) // 2
    first, second = work / f"first-{kind}-{seed}.csv", work / f"second-{kind}-{seed}.csv"
    first.write_text("".join(lines[:half]))
    second.write_text(lines[0] + "".join(lines[half:]))
    chosen = planned(first, seed)
    if chosen is None:
        return line(name, None, None)
    calls = load_trace(second, ZipfAdapters(num_adapters=1, skew=0, seed=0)).trace
    assert calls is not None
    known = {adapter: index for index, adapter in enumerate(chosen.scenario.workload.names)}
    kept = np.flatnonzero([calls.names[index] in known for index in calls.adapter])
    own = np.array([known[calls.names[index]] for index in calls.adapter[kept]])
    same = replace(calls.part(kept), adapter=own, num_adapters=len(known), names=tuple(known))
    return line(name, chosen, same)


def main() -> None:
    given = harness.flags(__doc__, json=False, traces=Path("shared/traces"), quick=False, out=Path)
    lines, started = list[str](), time.monotonic()
    found = list(stationary(given.quick))
    beyond = [cell for cell in found if abs(cell[-1]) > BAR + cell[5].high - cell[5].mean]
    errors = np.array([cell[-1] for cell in found]) * 100
    lines += [
        f"Stationary, {len(found)} cells: model minus simulation {errors.min():+.2f} to {errors.max():+.2f} points, "
        f"mean {errors.mean():+.2f}; beyond {BAR:.1%} and the interval: {len(beyond)}, of these too high "
        f"{sum(cell[-1] > 0 for cell in beyond)}.\n",
        "| N | s | LB | M | model | simulated, 95 % | points |\n|---|---|---|---|---|---|---|",
        *(
            f"| {n} | {s} | {lb:g} | {m} | {iar:.4f} | {e.mean:.4f} [{e.low:.4f}, {e.high:.4f}] | {100 * off:+.2f} |"
            for n, s, lb, m, iar, e, off in (
                found if given.quick else sorted(found, key=lambda cell: -abs(cell[-1]))[:12]
            )
        ),
    ]
    heading = "| GPUs | M | admitted at once, within TTFT | holds 0.95 |\n|---|---|---|---|---|"
    with harness.scratch() as work:
        lines.append(f"\nReplayed, the very trace:\n\n| trace {heading}")
        lines += [row(*one) for one in traces(given.traces, work, given.quick)]
        lines.append(f"\nPlanned by the first half, replayed with the second:\n\n| trace {heading}")
        for kind, seed in itertools.product(KINDS, (931,) if given.quick else (931, 932)):
            lines.append(halves(f"{kind}, seed {seed}", kind, seed, work))
    lines.append(f"\n{time.monotonic() - started:,.0f} s.")
    text = "\n".join(lines) + "\n"
    print(text)
    if given.out:
        given.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
