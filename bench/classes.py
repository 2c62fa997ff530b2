"""A strict SLO class while a lax one queues, at a live server: what each request waited for its place.

    python -m bench.classes [--json] [--crowd N] [--seconds S] [--rounds N]

PLACES adapters are active at a time, and requests hold one for HOLD_SECONDS on average, so that PLACES / HOLD_SECONDS
requests are served per second. Requests of class silver come at ten times that rate until --crowd have come, each of an
adapter of its own; those of class gold at half of it for --seconds. Two servers take turns: with --classes, and without
(first come, first served). Both are asked as vLLM's connector asks (bench/admission_client.py).

"within": the share whose place came within the class's TTFT objective. "longest": no request starves.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench import admission, harness
from bench.admission_client import Call, Job, Seen
from lora_server.demo.launch import RunningServer

PLACES, HOLD_SECONDS, GOLD_ADAPTERS = 8, 0.4, 100
OBJECTIVES = {"gold": 0.5, "silver": 2.0}  # s to the first token
CLASSES = """
gold: {slo: "ttft_p99=500ms,tpot_avg=1s", adapters: ["tenant-?", "tenant-??"]}
silver: {slo: "ttft_p99=2s,tpot_avg=1s", adapters: ["tenant-*"]}
"""
ORDERS = {"classes": ("--classes", "classes.yaml"), "first come": ()}
PATIENCE = 600.0


def calls(seed: int, rate: float, count: int, adapters: Sequence[int]) -> Iterator[Call]:
    """Poisson arrivals, of one adapter after the other."""
    dice, at = random.Random(seed), 0.0
    for index in range(count):
        at += dice.expovariate(rate)
        name = admission.name_of(adapters[index % len(adapters)])
        yield Call(index, at, name, dice.uniform(0.5, 1.5) * HOLD_SECONDS)


def jobs(server: RunningServer, seed: int, crowd: int, seconds: float) -> dict[str, Job]:
    """One client's calls for each class."""
    served = PLACES / HOLD_SECONDS
    gold = calls(2 * seed, served / 2, round(served / 2 * seconds), range(GOLD_ADAPTERS))
    silver = calls(2 * seed + 1, 10 * served, crowd, range(GOLD_ADAPTERS, GOLD_ADAPTERS + crowd))
    return {"gold": Job(server.address, list(gold)), "silver": Job(server.address, list(silver))}


def ask(server: RunningServer, its_jobs: dict[str, Job], work: Path) -> dict[str, list[Seen]]:
    """Make all calls; return what became of each class's once all have had their places."""

    def served() -> bool:
        now = harness.status(server.address)
        return not now.queued and not now.active

    with admission.asking(list(its_jobs.values()), work) as running:
        harness.until(served, "all have had their places", PATIENCE)
        return {name: admission.outcomes([one]) for name, one in zip(its_jobs, running, strict=True)}


def measure(crowd: int, seconds: float, rounds: int) -> list[dict[str, Any]]:
    """Rows of the table."""
    waits: dict[tuple[str, str], list[float]] = {}
    with harness.scratch() as work:
        admission.make(work, GOLD_ADAPTERS + crowd)
        (work / "classes.yaml").write_text(CLASSES)
        for seed in range(rounds):
            for order, flags in ORDERS.items():
                own = [str(work / one) if one.endswith(".yaml") else one for one in flags]
                with admission.serving(work, "--max-active-adapters", str(PLACES), *own) as server:
                    for name, seen in ask(server, jobs(server, seed, crowd, seconds), work).items():
                        lost = [one for one in seen if one.admitted is None]
                        if lost:
                            raise RuntimeError(f"{len(lost)} of {len(seen)} {name} requests got no place: {lost[:1]}")
                        got = [one.admitted - one.asked for one in seen if one.admitted is not None]
                        waits.setdefault((order, name), []).extend(got)
    return [_row(order, name, np.array(seen)) for (order, name), seen in waits.items()]


def _row(order: str, name: str, waited: Any) -> dict[str, Any]:
    p50, p95, p99 = (1e3 * np.percentile(waited, (50, 95, 99))).tolist()
    within = float((waited <= OBJECTIVES[name]).mean())
    more = {"requests": len(waited), "within": within, "longest_ms": 1e3 * float(waited.max())}
    return {"order": order, "class": name, "p50_ms": p50, "p95_ms": p95, "p99_ms": p99, **more}


COLUMNS = (
    "order {order} | class {class} | requests {requests:,d} | p50 ms {p50_ms:,.0f} | p95 {p95_ms:,.0f} | "
    "p99 {p99_ms:,.0f} | longest {longest_ms:,.0f} | within {within:.3f}"
)


def main() -> None:
    given = harness.flags(__doc__, crowd=200, seconds=20.0, rounds=2)
    rows = measure(given.crowd, given.seconds, given.rounds)
    harness.show(given, rows, harness.table("Waits for a place while silver queues", rows, COLUMNS))


if __name__ == "__main__":
    main()
