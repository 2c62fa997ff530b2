"""A LoRA server beside what people would use instead: one machine, one run, the same requests, equal cores.

    make race                      all rows, results and plot in bench/results; quarter of an hour on two quiet cores
    make race ARGS=--short         a tiny model and a few requests, to see that it runs; writes nothing unless --out

base          vLLM without adapters, on all cores and on one: what no adapter costs
vLLM's LoRA   vLLM's own, tuned: the number of places (max_loras) and threads that serves the first load best
ours          the same vLLM on one core, and a LoRA server of one shard on the other
PEFT          transformers and PEFT, mixed batches; a batch ends with its longest answer

vLLM engines run as vLLM serves them (AsyncLLM, engine core in its own process) and are all started before the first
row; rows take turns. Adapters have ranks 8, 16, 32 and 64 in turn, were all read once, and are asked for by Zipf 1.0.
Open loop: Poisson arrivals, or those of a trace, compressed. Closed loop: so many requests in flight. A row counts calls
whose tokens are those of `ours`: equal / compared, as far as both answered.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from bench import harness
from bench.race import load, report, score
from bench.race.load import Call, Job, Seen
from bench.race.make import make
from bench.race.systems import Contestant, System, running
from lora_server.demo import children

SAY = Console(stderr=True)


@dataclass(frozen=True)
class Plan:
    """The sizes of a run."""

    model: dict[str, Any]
    seconds: float
    cores: int
    places: tuple[int, ...] = (4, 8, 16, 64)
    counts: tuple[int, ...] = (64, 16, 256)  # of attention adapters; the first has all rows
    all_sites: int = 64
    rates: tuple[float, ...] = (1.0, 2.0, 3.0, 4.0, 6.0)
    some_rates: tuple[float, ...] = (2.0, 3.0)  # of the other counts and sites
    width: int = 16
    peft_rate: float = 1.0
    trace_rate: float = 2.0


FULL = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 4096,
    "max_position_embeddings": 1024,
}
TINY = {"head_dim": 32, "max_position_embeddings": 1024, "num_hidden_layers": 2}
SHORT = {"places": (2,), "counts": (3,), "all_sites": 3, "rates": (4.0,), "some_rates": (4.0,), "width": 4}


@dataclass
class Race:
    """The rows so far. `stacks`: what runs, by name of the system."""

    plan: Plan
    work: Path
    adapters: list[str]
    running: dict[str, Contestant] = field(default_factory=dict)
    stacks: dict[str, contextlib.ExitStack] = field(default_factory=dict)
    rows: list[score.Row] = field(default_factory=list)

    def start(self, system: System) -> None:
        """Start a system, and have it read all its adapters."""
        began, stack = time.monotonic(), contextlib.ExitStack()
        self.stacks[system.name] = stack
        mine = [name for name in self.adapters if system.kind == "ours" or name.startswith(system.sites)]
        if system.kind == "peft":
            mine = mine[: self.plan.counts[0]]
        contestant = self.running[system.name] = stack.enter_context(running(system, self.work, mine))
        warm = [call for call in load.every(mine) if system.kind != "base"] or load.every(["base"])
        contestant.ask(Job(warm, 0, 300.0))
        SAY.print(f"{system.name}: started in {time.monotonic() - began:.0f} s")

    def stop(self, name: str) -> None:
        """Stop a system."""
        del self.running[name]
        self.stacks.pop(name).close()

    def run(self, names: Sequence[str], calls: list[Call], width: int = 0, **about: Any) -> list[score.Row]:
        """Have systems run the same calls one after the other; returns their rows."""
        job = Job(calls, width, self.plan.seconds * (0.6 if width else 1.6))
        turn = len(self.rows) % len(names)
        seen: dict[str, list[Seen]] = {}
        for name in [*names[turn:], *names[:turn]]:
            seen[name] = self.running[name].ask(job)
        made = []
        for name in names:
            same, both = score.compare(seen[name], seen["ours"]) if "ours" in seen and name != "ours" else (0, 0)
            if self.running[name].system.kind == "base":
                same = both = 0
            made.append({**about, "system": name, **score.row(job, seen[name]), "equal": same, "compared": both})
            SAY.print(report.line(made[-1]))
        self.rows += made
        return made


def tune(race: Race, calls: list[Call], **about: Any) -> str:
    """Start vLLM's own LoRA in each setting; returns the name of the one that serves the calls best, the others end."""
    cores = race.plan.cores
    systems = [System(f"vLLM's LoRA, {n} places", "own", cores, n) for n in race.plan.places]
    if len(systems) > 1:
        systems.append(System(f"vLLM's LoRA, {systems[1].places} places, 1 thread", "own", 1, systems[1].places))
    for system in systems:
        race.start(system)
    names = [system.name for system in systems]
    rows = race.run(names, calls, **about)
    best = max(rows, key=lambda one: (one["within"], -one["ttft_p95_s"]))["system"]
    for name in names:
        if name != best:
            race.stop(name)
    return str(best)


def race_all(plan: Plan, work: Path, traces: Path) -> list[score.Row]:
    """Run all rows."""
    began = time.monotonic()
    adapters = make(work, plan.model, {"attention": max(plan.counts), "all": plan.all_sites})
    SAY.print(f"made {len(adapters)} adapters in {time.monotonic() - began:.0f} s")
    with contextlib.ExitStack() as all_stacks:
        race = Race(plan, work, adapters)
        all_stacks.callback(lambda: [stack.close() for stack in race.stacks.values()])
        _run(race, traces)
        return race.rows


def _run(race: Race, traces: Path) -> None:
    plan, first = race.plan, race.plan.counts[0]
    attention = load.names("attention", first)
    pilot = plan.rates[min(1, len(plan.rates) - 1)]
    about = {"adapters": first, "sites": "attention"}
    best = tune(race, load.poisson(attention, pilot, plan.seconds, 1), load="tuning", rate=pilot, **about)
    base, one = System("base", "base", plan.cores), System("base, 1 thread", "base", 1)
    for system in (base, one, System("ours", "ours", max(1, plan.cores - 1))):
        race.start(system)
    ladder(race, ["base", best, "ours"], attention, plan.rates, about)
    closed = load.supply(attention, 256, 2)
    race.run(["base", "base, 1 thread", best, "ours"], closed, plan.width, load="closed", rate=plan.width, **about)
    for name, file in load.TRACES.items():
        if (traces / file).exists():
            calls = load.compressed(traces / file, attention, plan.trace_rate, plan.seconds, 3)
            race.run([best, "ours"], calls, load=name, rate=plan.trace_rate, **about)
        else:
            SAY.print(f"{name}: left out, there is no {traces / file}")
    for count in plan.counts[1:]:
        named = load.names("attention", count)
        ladder(race, [best, "ours"], named, plan.some_rates, about | {"adapters": count})
        calls = load.supply(named, 256, 2)
        race.run([best, "ours"], calls, plan.width, load="closed", rate=plan.width, **about | {"adapters": count})
    of_all_sites(race, best)
    with_peft(race, attention, about)


def ladder(
    race: Race, names: Sequence[str], adapters: list[str], rates: Sequence[float], about: Mapping[str, Any]
) -> None:
    """Run Poisson loads of rising rates; a system that serves less than half of one is left out of the next."""
    going = list(names)
    for number, rate in enumerate(rates):
        calls = load.poisson(adapters, rate, race.plan.seconds, 10 + number)
        rows = race.run(going, calls, load="poisson", rate=rate, **about)
        going = [one["system"] for one in rows if one["within"] >= 0.5]
        if not going:
            return


def of_all_sites(race: Race, best: str) -> None:
    """Adapters of all sites; vLLM's own LoRA in the best setting of the attention's."""
    old = race.running[best].system
    race.stop(best)
    system = System(best, "own", old.threads, old.places, "all")
    race.start(system)
    named, about = load.names("all", race.plan.all_sites), {"adapters": race.plan.all_sites, "sites": "all"}
    ladder(race, [best, "ours"], named, race.plan.some_rates, about)
    calls, width = load.supply(named, 256, 2), race.plan.width
    race.run(["base", "base, 1 thread", best, "ours"], calls, width, load="closed", rate=width, **about)
    race.stop(best)


def with_peft(race: Race, adapters: list[str], about: Mapping[str, Any]) -> None:
    """Rows of PEFT, with those of ours again, so that they are of one moment."""
    plan = race.plan
    race.start(System("PEFT", "peft", plan.cores))
    calls = load.poisson(adapters, plan.peft_rate, plan.seconds, 10)
    race.run(["PEFT", "ours"], calls, load="poisson, with PEFT", rate=plan.peft_rate, **about)
    calls = load.supply(adapters, 256, 2)
    race.run(["PEFT", "ours"], calls, plan.width, load="closed, with PEFT", rate=plan.width, **about)


def hardware(cores: int) -> str:
    """Describe the machine in a line."""
    text = Path("/proc/cpuinfo").read_text()
    model = next((line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")), "?")
    return f"{cores} cores of {model}, Linux {platform.release()}, Python {platform.python_version()}"


def main() -> None:
    """Command line."""
    results = Path(__file__).parents[1] / "results"
    options = {"seconds": 16.0, "cores": 2, "traces": Path("shared/traces"), "out": Path()}
    given = harness.flags(__doc__, short=False, **options)
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: given.cores])
    plan = Plan(FULL, given.seconds, given.cores)
    if given.short:
        plan = Plan(**({"model": TINY, "seconds": min(given.seconds, 2.0), "cores": given.cores} | SHORT))
    began = time.monotonic()
    with children.ending_on_signals(), tempfile.TemporaryDirectory(prefix="race-") as scratch:
        rows = race_all(plan, Path(scratch), given.traces)
    found = {
        "command": f"make race{' ARGS=' + json.dumps(' '.join(sys.argv[1:])) if sys.argv[1:] else ''}",
        "hardware": hardware(given.cores),
        "versions": report.versions(),
        "load_average": os.getloadavg()[0],
        "seconds": round(time.monotonic() - began),
        "slo": {"ttft_s": score.TTFT_SECONDS, "tpot_s": score.TPOT_SECONDS},
        "model": plan.model,
        "rows": rows,
    }
    out = given.out if given.out != Path() else None if given.short else results
    if out is not None:
        report.write(found, out)
    harness.show(given, found, *report.tables(found), width=140)


if __name__ == "__main__":
    main()
