"""The wait of a small step in a shard that other clients keep full of large steps: with turns, and without.

    python -m bench.turns [--json] [--rounds N]

One shard of Mixtral-8x7B's sizes on the CPU, in one thread with its clients, so that the measure is the shard's own CPU
time: 16 clients always have the next step of 256 entries ready, and one pushes 8 entries when some part of a step of
theirs is done. Its time is from the push to the answer. "alone": without the others; "whole": a turn never ends, so
every step is served in one piece. The three cases alternate in each round.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Collection, Iterator
from typing import Any

import numpy as np
import torch

from bench import harness
from bench.step_client import StepClient
from kernels_cuda import cpu
from kernels_cuda.ops import Block, Pair, Segment, Step, stack
from lora_server.shard import loop
from lora_server.shard.compute import HostCompute
from lora_server.shard.coordination import Independent
from lora_server.spec import PRESETS, Site
from lora_server.timings import Timings
from lora_server.transport.base import Grant, Port
from lora_server.transport.inproc import InprocLink
from lora_server.wire.messages import Hello
from lora_server.wire.region import RegionLayout

CLIENTS, LARGE, SMALL, LORA_RANK = 16, 256, 8, 16
SITES = (Site(0, "gate_up"), Site(0, "down"))
SPEC = PRESETS["mixtral-8x7b"]
MOST_PARTS = 30  # the small client pushes after so many parts of the others' steps, at the latest
TURNS = {"alone": Timings.turn, "in turns": Timings.turn, "whole": 3600.0}


class OneAdapter:
    """A store that has everything: one adapter, the same weights for every expert."""

    def __init__(self) -> None:
        self._blocks = {site: self._block(site) for site in SITES}

    def _block(self, site: Site) -> Block:
        a_RK, b_OR = torch.randn(LORA_RANK, SPEC.in_width(site)), torch.randn(SPEC.out_width(site), LORA_RANK)
        return stack([Pair(a_RK, b_OR, 1.0, 0)])

    def pin(self, handles: Collection[int], layer: int, owner: int, deadline: float) -> int:
        return 0

    def unpin(self, pin: int) -> None:
        return

    def forget(self, owner: int) -> None:
        return

    def gather(self, site: Site, segments_S4: np.ndarray[Any, Any], where: str) -> list[Segment]:
        return [Segment(self._blocks[site], first, entries) for _, _, first, entries in segments_S4.tolist()]


class Case:
    """A shard and its clients; the small client's push comes between two parts of a large step."""

    def __init__(self, site: Site) -> None:
        port = Port(RegionLayout.for_model(SPEC, LARGE, 2))
        store: Any = OneAdapter()
        self.shard = loop.Shard(0, SPEC, LARGE, port, store, Independent(), HostCompute(self._kernel))
        self._small = self._client(1, site, SMALL)
        self._others = [self._client(number + 2, site, LARGE) for number in range(CLIENTS)]
        self._parts_left, self._pushed_ns = -1, 0

    def _client(self, number: int, site: Site, entries: int) -> StepClient:
        self.shard.port.grant(Grant(number, 1, b""))
        self.shard.port.hold(number, [1])
        link = InprocLink(self.shard.port, Hello(number, 1, b""), 0, self.shard.serve_once)
        return StepClient(link, number, SPEC, site, entries, handle=1, depth=2, mapped=True)

    def _kernel(self, step: Step, out_UO: torch.Tensor) -> Iterator[None]:
        for _ in cpu.lora_parts(step, out_UO):
            if self._parts_left == 0:
                self._push()
            self._parts_left -= 1
            yield

    def _push(self) -> None:
        self._small.push()
        self._pushed_ns = time.process_time_ns()

    def milliseconds(self, way: str, parts: int) -> float:
        """Push the small step after so many `parts` of the others' steps; return the ms from the push to the answer."""
        self.shard.server.turn_ns, seq = TURNS[way] * 1e9, self._small.seq + 1
        self._parts_left = -1 if way == "alone" else parts
        if way == "alone":
            while self.shard.serve_once():
                pass
            self._push()
        while self._small.link.responded() < seq:
            for client in self._others if way != "alone" else ():
                if client.idle:
                    client.push()
            self.shard.serve_once()
            if self.shard.counters.failed:
                raise SystemExit("a step failed: see above")
        return (time.process_time_ns() - self._pushed_ns) / 1e6


def measure(site: Site, rounds: int, dice: random.Random) -> dict[str, list[float]]:
    """Measure the small step's milliseconds, by way."""
    case, times = Case(site), {way: list[float]() for way in TURNS}
    for _ in harness.progress(range(rounds), site.projection):
        for way, its in times.items():
            its.append(case.milliseconds(way, dice.randrange(MOST_PARTS)))
    return times


COLUMNS = "site {site} | way {way} | p50 ms {p50 ms:.2f} | p99 ms {p99 ms:.2f} | x {x:.2f}"


def main() -> None:
    given, dice = harness.flags(__doc__, rounds=300), random.Random(20261122)
    harness.one_thread()
    rows = []
    for site in SITES:
        times = measure(site, given.rounds, dice)
        own = statistics.quantiles(times["alone"], n=100)[98]
        for way, its in times.items():
            cuts = statistics.quantiles(its, n=100)
            facts = {"p50 ms": cuts[49], "p99 ms": cuts[98], "x": cuts[98] / own}
            rows.append({"site": site.projection, "way": way, **facts})
    harness.show(given, rows, harness.table("", rows, COLUMNS))


if __name__ == "__main__":
    main()
