"""Compares the policies of --eviction on recorded traffic, in virtual time.

    python -m bench.eviction [--json] [--traces DIR] [--requests N] [--adapters N]

Each request of a trace needs one adapter, and runs for its output tokens once that adapter is loaded. Adapters of
running and waiting requests are active. Those of running requests are never evicted; among the others the shard's own
functions choose (lora_server/memory/eviction.py: may_go, victims, POLICIES), by the counts of the shard's own Usage,
here updated once a second. One loader loads one adapter after the other, in the order of need, over a link; adapters
have ranks of 8 to 64. A request's cold wait is from its arrival until its adapter is loaded: it waits for the link or
for free memory. Pools are shares of the bytes of all adapters that are asked for. ServeGen's clients are adapters;
Azure's and Mooncake's requests get theirs by Zipf 1.2. Traces that are missing in --traces are left out.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench import harness
from lora_server.memory.entry import AdapterEntry, Footprint, Reason, Source, Want
from lora_server.memory.eviction import POLICIES, Policy, may_go, victims
from provisioning.workload import servegen, traces
from provisioning.workload.requests import Requests

FILES = {
    "servegen m-small": "servegen/m-small",
    "servegen m-mid": "servegen/m-mid",
    "azure conv": "AzureLLMInferenceTrace_conv_2023.csv",
    "azure code": "AzureLLMInferenceTrace_code_2023.csv",
    "mooncake": "mooncake_conversation_trace.jsonl",
}
POOLS = (0.1, 0.2, 0.4, 0.6)
RANKS, BYTES_PER_RANK = (8, 16, 32, 64), 12_000_000  # of Mixtral-8x7B on all experts, 16-bit: some 100 MB and more
LINK_BYTES, OPEN_SECONDS = 12e9 / 8, 0.02  # a network file system's; opening the files
TOKEN_SECONDS = 0.03
SERVEGEN_START, SERVEGEN_RATE = 36_000.0, 1.0  # ten in the morning; requests/s


@dataclass
class Outcome:
    hits: int = 0
    waits: list[float] = field(default_factory=list)  # of requests whose adapter was not there
    nbytes: int = 0


class Simulation:
    def __init__(self, requests: Requests, capacity: int, policy: Policy) -> None:
        self._entries = [
            AdapterEntry(i, Source(Path(), "", ""), (0,), i, Footprint(int(size)))
            for i, size in enumerate(sizes_of(requests))
        ]
        self._requests, self._free, self._policy = requests, capacity, policy
        self._resident: set[AdapterEntry] = set()
        self._running = [0] * len(self._entries)
        self._waiting: dict[AdapterEntry, list[int]] = {}  # requests, for adapters that are not there
        self._queue: deque[AdapterEntry] = deque()
        self._loading: AdapterEntry | None = None
        self._events: list[tuple[float, int, str, int]] = []
        self._ids = itertools.count()
        self.outcome = Outcome()

    def run(self) -> Outcome:
        for index, arrival in enumerate(self._requests.arrival_s.tolist()):
            self._at(arrival, "arrives", index)
        while self._events:
            now, _, kind, index = heapq.heappop(self._events)
            getattr(self, f"_{kind}")(now, index)
            self._load(now)
        return self.outcome

    def _at(self, now: float, kind: str, index: int) -> None:
        heapq.heappush(self._events, (now, next(self._ids), kind, index))

    def _arrives(self, now: float, index: int) -> None:
        entry = self._entries[self._requests.adapter[index]]
        if entry in self._resident:
            self.outcome.hits += 1
            self._begin(now, entry, index)
            return
        if entry not in self._waiting:
            self._waiting[entry] = []
            _activate(entry, True)
            entry.wants["requests"] = Want(Reason.STEP, "requests", now)
            if entry is not self._loading:
                self._queue.append(entry)
        self._waiting[entry].append(index)

    def _begin(self, now: float, entry: AdapterEntry, index: int) -> None:
        self._running[entry.handle] += 1
        _activate(entry, True)
        end = now + int(self._requests.output_tokens[index]) * TOKEN_SECONDS
        for second in np.arange(now, end, 1.0).tolist():
            self._at(second, "used", entry.handle)
        self._at(end, "ends", entry.handle)

    def _used(self, now: float, handle: int) -> None:
        self._entries[handle].usage.count(now)

    def _ends(self, now: float, handle: int) -> None:
        self._running[handle] -= 1
        _activate(self._entries[handle], self._running[handle] > 0)
        self._entries[handle].usage.count(now)

    def _load(self, now: float) -> None:
        """The next one that gets room, if the link is free."""
        if self._loading is not None:
            return
        for entry in self._queue:
            if self._make_room(entry, now):
                self._queue.remove(entry)
                self._loading, entry.progress.began = entry, now
                self._free -= entry.footprint.nbytes
                self.outcome.nbytes += entry.footprint.nbytes
                self._at(now + OPEN_SECONDS + entry.footprint.nbytes / LINK_BYTES, "there", entry.handle)
                return

    def _make_room(self, entry: AdapterEntry, now: float) -> bool:
        missing = entry.footprint.nbytes - self._free
        if missing > 0:
            resident = [one for one in self._resident if may_go(one, entry, now)]
            chosen = victims(missing, resident, lambda one: one.footprint.nbytes, self._policy)
            for one in chosen or ():
                self._resident.remove(one)
                one.copies.ready.clear()
                self._free += one.footprint.nbytes
            return chosen is not None
        return True

    def _there(self, now: float, handle: int) -> None:
        entry, self._loading = self._entries[handle], None
        entry.copies.ready.add(0)
        entry.note_layer(now)
        del entry.wants["requests"]
        self._resident.add(entry)
        for index in self._waiting.pop(entry):
            self.outcome.waits.append(now - float(self._requests.arrival_s[index]))
            self._begin(now, entry, index)


def _activate(entry: AdapterEntry, active: bool) -> None:
    if active:
        entry.wants[Reason.ACTIVE] = Want(Reason.ACTIVE, Reason.ACTIVE)
    else:
        entry.wants.pop(Reason.ACTIVE, None)


def requests_of(path: Path, num: int, adapters: int) -> Requests:
    if path.is_dir():
        span_s = num / SERVEGEN_RATE
        found = servegen.load(path).requests(start_s=SERVEGEN_START, span_s=span_s, seed=0, rate=SERVEGEN_RATE)
    else:
        found, _ = traces.read(path, traces.ZipfAdapters(num_adapters=adapters))
    return found.part(slice(num))


def sizes_of(requests: Requests) -> NDArray[np.int64]:
    """Draw the bytes of each adapter."""
    return np.random.default_rng(0).choice(RANKS, requests.num_adapters) * BYTES_PER_RANK


def simulate(requests: Requests, pool: float, policy: str) -> dict[str, Any]:
    """Simulate one row of the table. The pool has room for at least two adapters of the largest rank."""
    asked = int(sizes_of(requests)[np.unique(requests.adapter)].sum())
    capacity = max(round(asked * pool), 2 * max(RANKS) * BYTES_PER_RANK)
    outcome = Simulation(requests, capacity, POLICIES[policy]).run()
    waits = np.array(outcome.waits or [0.0])
    return {
        "pool": pool,
        "pool_gb": capacity / 1e9,
        "policy": policy,
        "hit_rate": outcome.hits / len(requests),
        "cold_seconds": float(waits.sum()),
        "cold_p99_s": float(np.percentile(waits, 99)),
        "loaded_gb": outcome.nbytes / 1e9,
    }


def over_traces(
    given: argparse.Namespace,
    simulate: Callable[..., dict[str, Any]],
    cases: Iterable[tuple[Any, ...]],
    prepare: Callable[[Requests], Requests] = lambda requests: requests,
) -> list[dict[str, Any]]:
    """Simulate every trace that exists in all cases; return the rows."""
    rows, every = [], list(cases)
    there = {name: given.traces / file for name, file in FILES.items() if (given.traces / file).exists()}
    for name, path in there.items():
        requests = prepare(requests_of(path, given.requests, given.adapters))
        rows += [{"trace": name} | simulate(requests, *case) for case in harness.progress(every, name)]
    return rows


COLUMNS = (
    "trace {trace} | pool {pool:.0%} | GB {pool_gb:.1f} | policy {policy} | hit rate {hit_rate:.3f} | "
    "cold, all {cold_seconds:,.0f} | cold, p99 {cold_p99_s:.2f} | loaded GB {loaded_gb:,.0f}"
)


def main() -> None:
    given = harness.flags(__doc__, traces=Path("shared/traces"), requests=1500, adapters=256)
    rows = over_traces(given, simulate, itertools.product(POOLS, POLICIES))
    title = f"{given.requests:,} requests; cold waits in seconds"
    harness.show(given, rows, harness.table(title, rows, COLUMNS))


if __name__ == "__main__":
    main()
