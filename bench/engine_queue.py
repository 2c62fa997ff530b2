"""The order in which an engine takes waiting requests, on recorded traffic, in virtual time.

    python -m bench.engine_queue [--json] [--traces DIR] [--requests N] [--adapters N]

An engine makes passes of PASS_SECONDS with up to BATCH requests, each with one adapter. A shard loads one adapter after
the other, from disk or from host memory, and evicts the least recently used that no request holds; its pool has SHARE
of the bytes of all adapters that are asked for. Sizes and traces are those of bench/eviction.py, with arrivals spread
so that LOAD of the batch is busy. Waiting requests are taken

    fifo             in the order in which they came; a load begins when its request is taken, and the pass waits for it
    overlap          likewise, but the load begins when the request comes (what this server did before)
    resident first   loaded ones first; for another, the load begins when there is a place in the batch
    + prefetch       likewise, but the loads of the first LOOKAHEAD requests begin as they come (what this server does)
    + limit          likewise, with at most LIMIT adapters in a batch

Times to first token in seconds.
"""

from __future__ import annotations

import itertools
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bench import harness
from bench.eviction import LINK_BYTES, OPEN_SECONDS, TOKEN_SECONDS, over_traces, sizes_of
from provisioning.arrays import Floats
from provisioning.workload.requests import Requests

PASS_SECONDS, BATCH, LOAD, LOOKAHEAD, LIMIT, SHARE = TOKEN_SECONDS, 32, 0.8, 64, 12, 0.3
LINKS = {"disk": (OPEN_SECONDS, LINK_BYTES), "host": (0.0, 12e9)}  # seconds of a load at least, bytes/s
NEVER = float("inf")


class Policy(NamedTuple):
    """`waits`: a pass waits for the adapters of its requests. `ahead`: requests whose loads begin before they are
    taken. `limit`: adapters in a batch."""

    waits: bool
    ahead: int
    limit: int = BATCH


POLICIES = {
    "fifo": Policy(True, 0),
    "overlap": Policy(True, LOOKAHEAD),
    "resident first": Policy(False, 0),
    "+ prefetch": Policy(False, LOOKAHEAD),
    "+ limit": Policy(False, LOOKAHEAD, LIMIT),
}


@dataclass
class Pool:
    """The adapters of a shard: `loaded` in LRU order; `held` by requests; one link, whose loads follow each other."""

    sizes: list[int]
    free: int
    link: tuple[float, float]
    loaded: OrderedDict[int, None] = field(default_factory=OrderedDict)
    held: Counter[int] = field(default_factory=Counter)
    ready: dict[int, float] = field(default_factory=dict)  # when those that load are loaded
    link_free: float = 0.0

    def advance(self, now: float) -> None:
        """Note the loads that have ended."""
        for adapter in [one for one, at in self.ready.items() if at <= now]:
            del self.ready[adapter]
            self.loaded[adapter] = None

    def hold(self, adapter: int, now: float) -> bool:
        """Hold an adapter for a request, and begin its load; return whether there is a place for it."""
        if adapter not in self.loaded and adapter not in self.ready:
            idle = [one for one in self.loaded if not self.held[one]]
            if self.free + sum(self.sizes[one] for one in idle) < self.sizes[adapter]:
                return False
            for one in idle:
                if self.free >= self.sizes[adapter]:
                    break
                del self.loaded[one]
                self.free += self.sizes[one]
            self.free -= self.sizes[adapter]
            begins = max(now, self.link_free)
            self.link_free = self.ready[adapter] = begins + self.link[0] + self.sizes[adapter] / self.link[1]
        self.held[adapter] += 1
        return True

    def release(self, adapter: int) -> None:
        self.held[adapter] -= 1
        if adapter in self.loaded:
            self.loaded.move_to_end(adapter)


class Simulation:
    """One engine, from the first request to the last first token."""

    def __init__(self, requests: Requests, pool: Pool, policy: Policy) -> None:
        self._arrivals, self._adapters = requests.arrival_s.tolist(), requests.adapter.tolist()
        self._tokens = requests.output_tokens.tolist()
        self._pool, self._policy = pool, policy
        self._waiting: OrderedDict[int, bool] = OrderedDict()  # request -> whether it holds its adapter
        self._running: dict[int, int] = {}  # request -> tokens left
        self._next = 0
        self.first = [0.0] * len(requests)
        self.longest = 0.0  # pass

    def run(self) -> Floats:
        """Return each request's time to its first token."""
        now = 0.0
        while self._next < len(self._arrivals) or self._waiting or self._running:
            self._pool.advance(now)
            while self._next < len(self._arrivals) and self._arrivals[self._next] <= now:
                self._waiting[self._next] = False
                self._next += 1
            self._prefetch(now)
            taken = self._take(now)
            now = self._pass(now, taken) if self._running else self._idle(now)
        return np.array(self.first) - np.array(self._arrivals)

    def _prefetch(self, now: float) -> None:
        for request in itertools.islice(self._waiting, self._policy.ahead):
            if not self._waiting[request] and not self._hold(request, now):
                return  # first come, first served: the first without a place holds up the others' prefetches

    def _hold(self, request: int, now: float) -> bool:
        self._waiting[request] = self._pool.hold(self._adapters[request], now)
        return self._waiting[request]

    def _take(self, now: float) -> list[int]:
        taken: list[int] = []
        batch = Counter(self._adapters[one] for one in self._running)
        places, coming = BATCH - len(self._running), 0
        for request in list(self._waiting):
            if len(taken) == places:
                break
            adapter = self._adapters[request]
            if not self._waiting[request] and (adapter in self._pool.loaded or len(taken) + coming < places):
                self._hold(request, now)
            if not self._waiting[request]:
                if self._policy.waits:
                    break
                continue
            is_there = adapter in self._pool.loaded
            if (is_there or self._policy.waits) and (batch[adapter] or len(+batch) < self._policy.limit):
                batch[adapter] += 1
                taken.append(request)
            else:
                coming += 1
        for request in taken:
            del self._waiting[request]
            self._running[request] = self._tokens[request]
        return taken

    def _pass(self, now: float, taken: list[int]) -> float:
        waits = max((self._pool.ready.get(self._adapters[one], now) for one in self._running), default=now)
        ends = max(now, waits) + PASS_SECONDS
        self.longest = max(self.longest, ends - now)
        for request in taken:
            self.first[request] = ends
        for request in list(self._running):
            self._running[request] -= 1
            if self._running[request] <= 0:
                del self._running[request]
                self._pool.release(self._adapters[request])
        return ends

    def _idle(self, now: float) -> float:
        arrives = self._arrivals[self._next] if self._next < len(self._arrivals) else NEVER
        return max(now + 1e-6, min([arrives, *self._pool.ready.values()]))


def spread(requests: Requests) -> Requests:
    """Scale the arrivals, so that LOAD of the batch is busy on average."""
    in_flight = requests.output_tokens.sum() * PASS_SECONDS / requests.span_s
    return requests.slowed(in_flight / (LOAD * BATCH))


def simulate(requests: Requests, link: str, policy: str) -> dict[str, Any]:
    """Simulate one row of the table. The pool has room for at least four adapters of the largest rank."""
    sizes = sizes_of(requests).tolist()
    asked = sum(sizes[one] for one in np.unique(requests.adapter))
    pool = Pool(sizes, max(round(asked * SHARE), 4 * max(sizes)), LINKS[link])
    simulation = Simulation(requests, pool, POLICIES[policy])
    p50, p95, p99 = np.percentile(simulation.run(), (50, 95, 99)).tolist()
    return {"link": link, "policy": policy, "p50": p50, "p95": p95, "p99": p99, "longest": simulation.longest}


COLUMNS = (
    "trace {trace} | link {link} | order {policy} | p50 {p50:.3f} | p95 {p95:.3f} | p99 {p99:.3f} | "
    "longest pass {longest:.2f}"
)


def main() -> None:
    given = harness.flags(__doc__, traces=Path("shared/traces"), requests=3000, adapters=256)
    rows = over_traces(given, simulate, itertools.product(LINKS, POLICIES), spread)
    title = f"{given.requests:,} requests; seconds"
    harness.show(given, rows, harness.table(title, rows, COLUMNS))


if __name__ == "__main__":
    main()
