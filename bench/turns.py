"""How long a small step waits in a shard that others keep full of the largest: in turns, and with steps served whole.

    python -m bench.turns [--json] [--rounds N]

One shard of Mixtral-8x7B's sizes on the CPU, in one thread with its clients, so that what is counted is the shard's own
time (of the process, not of the clock): 16 clients that have the next step of 256 entries ready when one is answered,
and one that pushes 8 entries when some part of a step of theirs is done. Its time is from the push to the answer.
"alone": without the others; "whole": a turn never ends, as before there were turns. The three take turns in each round.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import struct
import time
from collections.abc import Collection, Iterator
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from kernels_cuda import cpu
from kernels_cuda.ops import Block, Pair, Segment, Step, stack
from lora_server.shard import loop
from lora_server.shard.compute import HostCompute
from lora_server.shard.coordination import Independent
from lora_server.spec import PRESETS, PROJECTIONS, Site
from lora_server.timings import Timings
from lora_server.transport.base import Grant, Port
from lora_server.transport.inproc import InprocLink
from lora_server.wire import slot
from lora_server.wire.messages import Hello
from lora_server.wire.region import RegionLayout
from lora_server.wire.slot import RequestHeader

CLIENTS, LARGE, SMALL, LORA_RANK = 16, 256, 8, 16
SITES = (Site(0, "gate_up"), Site(0, "down"))
SPEC = PRESETS["mixtral-8x7b"]
MOST_PARTS = 30  # after so many of the others' at the latest it pushes
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


class Client:
    """Pushes the same step of two experts again and again."""

    def __init__(self, shard: loop.Shard, number: int, site: Site, entries: int) -> None:
        shard.port.grant(Grant(number, 1, b""))
        shard.port.hold(number, [1])
        self.link = InprocLink(shard.port, Hello(number, 1, b""), 0, shard.serve_once)
        self.seq, rows, width = 0, entries // 2, SPEC.in_width(site)
        flags = slot.HAS_IN_MAP | (slot.HAS_OUT_MAP if site.projection == "down" else 0)
        at = slot.request_offsets(2, entries, flags, rows * width * 4)
        summed = bool(flags & slot.HAS_OUT_MAP)
        for memory in (self.link.region.request(0), self.link.region.request(1)):
            struct.pack_into("<8I", memory, at.segments, 1, 0, 0, rows, 1, 1, rows, rows)
            struct.pack_into(f"<{entries}I", memory, at.in_map, *range(rows), *range(rows))
            if summed:
                struct.pack_into(f"<{entries}I", memory, at.out_map, *range(rows), *range(rows))
                struct.pack_into(f"<{entries}f", memory, at.weights, *[0.5] * entries)
        self._header = RequestHeader(
            step_class=slot.DECODE, flags=flags, client=number, epoch=1, seq=0, slot=0, layer=0,
            projection=PROJECTIONS.index(site.projection), dtype=0, num_rows=rows,
            num_entries=entries, num_segments=2, num_out_rows=rows if summed else entries, in_begin=0, in_end=width,
            windows=((0, SPEC.out_width(site)),), payload_bytes=at.end - slot.HEADER_BYTES, budget_us=60_000_000,
            pushed_ns=0,
        )  # fmt: skip

    def push(self) -> None:
        self.seq += 1
        self._header._replace(seq=self.seq).pack_into(self.link.region.request(self.seq))
        self.link.push(self.seq, 0)

    @property
    def idle(self) -> bool:
        return self.link.responded() == self.seq


class Case:
    """The shard, and what happens between two parts of a step."""

    def __init__(self, site: Site) -> None:
        port = Port(RegionLayout.for_model(SPEC, LARGE, 2))
        store: Any = OneAdapter()
        self.shard = loop.Shard(0, SPEC, LARGE, port, store, Independent(), HostCompute(self._kernel))
        self._small = Client(self.shard, 1, site, SMALL)
        self._others = [Client(self.shard, number + 2, site, LARGE) for number in range(CLIENTS)]
        self._parts_left, self._pushed_ns = -1, 0

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
        """From the push, after so many parts of others, to the answer."""
        self.shard.turn_seconds, seq = TURNS[way], self._small.seq + 1
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
    """Milliseconds, by way."""
    case, times = Case(site), {way: list[float]() for way in TURNS}
    for _ in track(range(rounds), site.projection, console=Console(stderr=True)):
        for way, its in times.items():
            its.append(case.milliseconds(way, dice.randrange(MOST_PARTS)))
    return times


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--json", action="store_true")
    arguments, dice = parser.parse_args(), random.Random(20261122)
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    rows = []
    for site in SITES:
        times = measure(site, arguments.rounds, dice)
        for way, its in times.items():
            cuts = statistics.quantiles(its, n=100)
            own = statistics.quantiles(times["alone"], n=100)[98]
            rows.append(
                {"site": site.projection, "way": way, "p50 ms": cuts[49], "p99 ms": cuts[98], "x": cuts[98] / own}
            )
    if arguments.json:
        print(json.dumps(rows, indent=2))
        return
    table = Table(*rows[0])
    for row in rows:
        table.add_row(*(f"{cell:.2f}" if isinstance(cell, float) else str(cell) for cell in row.values()))
    Console().print(table)


if __name__ == "__main__":
    main()
