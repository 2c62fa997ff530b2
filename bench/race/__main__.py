"""A LoRA server beside what people would use instead: one machine, one run, the same requests, equal cores.

    make race                      all rows, results and plot in bench/results; half an hour on two quiet cores
    make race ARGS="--only sglang" its rows alone, and ours; five minutes, a page of its own
    make race ARGS=--short         a tiny model and a few requests, to see that it runs; writes nothing unless --out

base          vLLM without adapters, on all cores and on one: what no adapter costs
vLLM's LoRA   vLLM's own, tuned: the number of places (max_loras) and threads that serves a middling load best; where
              that are more than 8 places, also with 8, as where GPU memory has no room for more
ours          the same vLLM on one core, and a LoRA server of one shard on the other
SGLang        by torch, since its kernels are for GPUs: without adapters, and with its own LoRA of 8 places, on all
              cores; with our connector as `ours`
PEFT          transformers and PEFT, mixed batches; a batch ends with its longest answer

Engines and the server keep to cores of their own, as vLLM does by default. vLLM engines run as vLLM serves
them (AsyncLLM, engine core in its own process) and are all started before the first row; systems take turns. Adapters
have ranks 8, 16, 32 and 64 in turn, were all read once, and are drawn by Zipf 1.0. Open loop: Poisson arrivals, or
those of a trace, compressed. Closed loop: so many requests in flight. `equal`: calls whose tokens are those of `ours`,
of the calls that both answered. Not here: mixture-of-experts models, for which vLLM has no LoRA on CPUs.
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
from bench.race.systems import SGLANG, START_SECONDS, Contestant, System, running
from lora_server.demo import children
from lora_server.errors import LoraServerError

SAY = Console(stderr=True)


@dataclass(frozen=True)
class Plan:
    """The sizes of a run."""

    model: dict[str, Any]
    seconds: float
    cores: int
    places: tuple[int, ...] = (8, 4, 16, 64)
    counts: tuple[int, ...] = (64, 16, 256)  # of attention adapters; the first has all rows
    all_sites: int = 64
    one_thread: bool = True  # also vLLM with one thread, without adapters and with its own LoRA
    rates: tuple[float, ...] = (1.0, 2.0, 3.0, 4.0, 6.0, 9.0)
    some_rates: tuple[float, ...] = (2.0, 3.0)  # of the other counts and sites
    climbs: int = 8  # at most so many rates beyond the highest, each a quarter higher, while a system serves 90 %
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
SHORT = {
    "places": (2,),
    "counts": (3,),
    "all_sites": 0,
    "one_thread": False,
    "rates": (4.0,),
    "some_rates": (4.0,),
    "climbs": 1,
    "width": 4,
}


@dataclass
class Race:
    """Systems that run, and the rows so far. `stacks` stop the systems; both are by the system's name."""

    plan: Plan
    work: Path
    adapters: list[str]
    running: dict[str, Contestant] = field(default_factory=dict)
    stacks: dict[str, contextlib.ExitStack] = field(default_factory=dict)
    rows: list[score.Row] = field(default_factory=list)

    def start(self, systems: Sequence[System]) -> None:
        """Start systems side by side, and have each read all its adapters."""
        began = time.monotonic()
        mine = {one.name: self._adapters_of(one) for one in systems}
        for one in systems:
            stack = self.stacks[one.name] = contextlib.ExitStack()
            self.running[one.name] = stack.enter_context(running(one, self.work, mine[one.name]))
        for one in systems:
            self.running[one.name].answer(START_SECONDS)
        for one in systems:
            names = [] if one.kind == "base" else mine[one.name]
            self.running[one.name].ask(Job(load.every(names or [None]), 0, START_SECONDS))
        SAY.print(f"{', '.join(one.name for one in systems)}: ready after {time.monotonic() - began:.0f} s")

    def _adapters_of(self, system: System) -> list[str]:
        served = [name for name in self.adapters if system.kind == "ours" or name.startswith(system.sites)]
        return served if system.engine == "vllm" else served[: self.plan.counts[0]]

    def stop(self, name: str) -> None:
        """Stop a system."""
        del self.running[name]
        self.stacks.pop(name).close()

    def run(self, names: Sequence[str], calls: list[Call], width: int = 0, **about: Any) -> list[score.Row]:
        """Have systems run the same calls one after the other; returns their rows."""
        # an open loop gets time for the answers to its last arrivals
        job = Job(calls, width, self.plan.seconds * (0.6 if width else 1.6))
        turn = len(self.rows) % len(names)
        seen: dict[str, list[Seen]] = {}
        for name in [*names[turn:], *names[:turn]]:
            seen[name] = self.running[name].ask(job)
            for failure in [one.failure for one in seen[name] if one.failure][:1]:
                SAY.print(f"{name}: a call failed: {failure}")
        made = []
        for name in names:
            same, both = score.compare(seen[name], seen["ours"]) if "ours" in seen and name != "ours" else (0, 0)
            if self.running[name].system.kind == "base":
                same = both = 0
            made.append({**about, "system": name, **score.row(job, seen[name]), "equal": same, "compared": both})
            SAY.print(report.line(made[-1]))
        self.rows += made
        return made


def tune(race: Race, calls: list[Call], **about: Any) -> list[str]:
    """Run vLLM's own LoRA by threads, then by places.

    Returns the names of those that stay: the best setting, and the first number of places if that is another.
    """
    few, *others = race.plan.places
    threads = [race.plan.cores, 1] if race.plan.one_thread else [race.plan.cores]
    first = best = _best(race, [own(few, count) for count in threads], calls, about)
    if others:
        best = _best(race, [own(places, first.threads) for places in others], calls, about, first)
    return list(dict.fromkeys([best.name, first.name]))


def own(places: int, threads: int) -> System:
    """Return a setting of vLLM's own LoRA."""
    return System(f"vLLM's LoRA, {places} places, {threads} thread{'s' * (threads > 1)}", "own", threads, places)


def _best(
    race: Race, systems: list[System], calls: list[Call], about: Mapping[str, Any], beside: System | None = None
) -> System:
    """Start systems, run the calls twice on these and on `beside`, and stop all but the best, which is returned.

    The better run of each counts: the first one after a start is often slow.
    """
    race.start(systems)
    names = [system.name for system in (*systems, *([beside] if beside else []))]
    rows = [row for _ in range(2) for row in race.run(names, calls, **about)]
    best = max(rows, key=lambda one: (one["within"], -one["ttft_p95_s"]))["system"]
    for name in names:
        if name != best and (beside is None or name != beside.name):
            race.stop(name)
    return race.running[best].system


def race_all(plan: Plan, work: Path, traces: Path, only: str = "") -> list[score.Row]:
    """Run all rows, or those with SGLang alone."""
    began = time.monotonic()
    adapters = make(work, plan.model, {"attention": max(plan.counts), "all": plan.all_sites})
    SAY.print(f"made {len(adapters)} adapters in {time.monotonic() - began:.0f} s")
    with contextlib.ExitStack() as all_stacks:
        race = Race(plan, work, adapters)
        all_stacks.callback(lambda: [stack.close() for stack in race.stacks.values()])
        first = plan.counts[0]
        attention, about = load.names("attention", first), {"adapters": first, "sites": "attention"}
        if only == "sglang":
            race.start([System("ours", "ours", max(1, plan.cores - 1))])
            with_sglang(race, attention, about)
        else:
            _run(race, traces, attention, about)
        return race.rows


def _run(race: Race, traces: Path, attention: list[str], about: Mapping[str, Any]) -> None:
    plan = race.plan
    pilot = plan.rates[len(plan.rates) // 2]
    own_ways = tune(race, load.poisson(attention, pilot, plan.seconds, 1), load="tuning", rate=pilot, **about)
    bases = [System("base", "base", plan.cores), System("base, 1 thread", "base", 1)][: 1 + plan.one_thread]
    race.start([*bases, System("ours", "ours", max(1, plan.cores - 1))])
    ladder(race, ["base", *own_ways, "ours"], attention, plan.rates, about, plan.climbs)
    closed = load.supply(attention, 256, 2)
    race.run(
        [*(one.name for one in bases), *own_ways, "ours"], closed, plan.width, load="closed", rate=plan.width, **about
    )
    for name, file in load.TRACES.items():
        if (traces / file).exists():
            calls = load.compressed(traces / file, attention, plan.trace_rate, plan.seconds, 3)
            race.run([*own_ways, "ours"], calls, load=name, rate=plan.trace_rate, **about)
        else:
            SAY.print(f"{name}: left out, there is no {traces / file}")
    best, *others = own_ways
    for name in others:
        race.stop(name)
    for count in plan.counts[1:]:
        named = load.names("attention", count)
        ladder(race, [best, "ours"], named, plan.some_rates, about | {"adapters": count})
        calls = load.supply(named, 256, 2)
        race.run([best, "ours"], calls, plan.width, load="closed", rate=plan.width, **about | {"adapters": count})
    if plan.all_sites:
        of_all_sites(race, best, [*(one.name for one in bases), best, "ours"])
    race.stop(best)
    for peer in (with_sglang, with_peft):
        before = set(race.running)
        try:
            peer(race, attention, about)
        except LoraServerError as error:  # the rows of the others are kept
            SAY.print(f"left out: {error}")
            for name in set(race.running) - before:
                race.stop(name)


def ladder(
    race: Race,
    names: Sequence[str],
    adapters: list[str],
    rates: Sequence[float],
    about: Mapping[str, Any],
    climbs: int = 0,
) -> None:
    """Run Poisson loads of rising rates; a system that serves less than half of one is left out of the next. `climbs`:
    see Plan; beyond the highest rate a system is left out once it serves less than ENOUGH."""
    going, beyond = list(names), [round(rates[-1] * 1.25**step, 1) for step in range(1, climbs + 1)]
    for number, rate in enumerate([*rates, *beyond]):
        calls = load.poisson(adapters, rate, race.plan.seconds, 10 + number)
        rows = race.run(going, calls, load="poisson", rate=rate, seed=10 + number, **about)
        least = 0.5 if rate < rates[-1] else score.ENOUGH
        going = [one["system"] for one in rows if one["within"] >= least]
        if not going:
            return


def of_all_sites(race: Race, best: str, everyone: Sequence[str]) -> None:
    """Race with adapters of all sites; vLLM's own LoRA has the setting that served attention adapters best."""
    old = race.running[best].system
    race.stop(best)
    race.start([System(best, "own", old.threads, old.places, "all")])
    named, about = load.names("all", race.plan.all_sites), {"adapters": race.plan.all_sites, "sites": "all"}
    ladder(race, [best, "ours"], named, race.plan.some_rates, about)
    calls, width = load.supply(named, 256, 2), race.plan.width
    race.run(everyone, calls, width, load="closed", rate=width, **about)


def with_sglang(race: Race, adapters: list[str], about: Mapping[str, Any]) -> None:
    """Race SGLang, with our connector too, and ours again in turn with it, so that their rows can be compared.

    Raises LoraServerError where it is not installed, or does not start.
    """
    if not SGLANG.exists():
        raise LoraServerError(f"SGLang: there is no {SGLANG}; make race makes it")
    plan = race.plan
    of_sglang = [
        System("SGLang", "base", plan.cores, engine="sglang"),
        System(f"SGLang's LoRA, {plan.places[0]} places", "own", plan.cores, plan.places[0], engine="sglang"),
        System("ours in SGLang", "ours", max(1, plan.cores - 1), engine="sglang"),
    ]
    race.start(of_sglang)
    names = [*(one.name for one in of_sglang), "ours"]
    for number, rate in enumerate(plan.some_rates):
        calls = load.poisson(adapters, rate, plan.seconds, 10 + number)
        race.run(names, calls, load="poisson, SGLang", rate=rate, **about)
    race.run(names, load.supply(adapters, 256, 2), plan.width, load="closed, SGLang", rate=plan.width, **about)
    for name in names[:-1]:
        race.stop(name)


def with_peft(race: Race, adapters: list[str], about: Mapping[str, Any]) -> None:
    """Race PEFT, and ours again in turn with it, so that their rows can be compared."""
    plan = race.plan
    race.start([System("PEFT", "own", plan.cores, engine="peft")])
    calls = load.poisson(adapters, plan.peft_rate, plan.seconds, 10)
    race.run(["PEFT", "ours"], calls, load="poisson, PEFT", rate=plan.peft_rate, **about)
    calls = load.supply(adapters, 256, 2)
    race.run(["PEFT", "ours"], calls, plan.width, load="closed, PEFT", rate=plan.width, **about)


def hardware(cores: int) -> str:
    """Describe the machine in a line."""
    text = Path("/proc/cpuinfo").read_text()
    model = next((line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")), "?")
    return f"{cores} cores of {model}, Linux {platform.release()}, Python {platform.python_version()}"


def main() -> None:
    """Command line."""
    results = Path(__file__).parents[1] / "results"
    options = {"seconds": 16.0, "cores": 2, "traces": Path("shared/traces"), "out": Path(), "only": ""}
    given = harness.flags(__doc__, short=False, **options)
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: given.cores])
    plan = Plan(FULL, given.seconds, given.cores)
    if given.short:
        plan = Plan(**({"model": TINY, "seconds": min(given.seconds, 2.0), "cores": given.cores} | SHORT))
    began = time.monotonic()
    with children.ending_on_signals(), tempfile.TemporaryDirectory(prefix="race-") as scratch:
        rows = race_all(plan, Path(scratch), given.traces, given.only)
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
        report.write(found, out, given.only)
    harness.show(given, found, *report.tables(found), width=160)


if __name__ == "__main__":
    main()
