"""Changes between scrapes. A counter that fell was reset: its value came since, as in Prometheus."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from provisioning.arrays import Floats
from provisioning.inputs import InputError
from provisioning.watch.scrape import ADMITTED, BUILD, HOLDS, QUEUE, REGISTERED, SHARD_SUMS, WAITED, Scrape
from provisioning.workload.requests import Lengths
from provisioning.workload.workload import Workload

OTHER = "(other)"
_MOST_GAP_SECONDS, _DAY_SECONDS = 3600.0, 86_400.0


class ServerBuild(NamedTuple):
    """The model, layout and replicas that a server says of itself; empty where it does not say them."""

    model: str = ""
    geometry: str = ""
    layout: str = ""
    replicas: str = ""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Sums over `seconds`, which are NaN where the scrapes do not tell. By adapter: requests, and seconds held."""

    seconds: float
    registered: int
    holds: dict[str, tuple[float, float]]
    admitted: float
    at_once: float
    waited_seconds: float
    shards: dict[str, float] = field(default_factory=dict)
    resets: int = 0
    server: ServerBuild = field(default_factory=ServerBuild)

    @property
    def requests(self) -> float:
        """Requests that ended."""
        return sum(calls for calls, _ in self.holds.values())

    @property
    def rate(self) -> float:
        """Requests/s."""
        return self.requests / self.seconds

    @property
    def held_s(self) -> float:
        """Mean of a request; NaN without requests."""
        return self._held_s / self.requests if self.requests else math.nan

    @property
    def in_flight(self) -> float:
        """LB, the mean over time, by Little's law."""
        return self._held_s / self.seconds

    @property
    def _held_s(self) -> float:
        return sum(seconds for _, seconds in self.holds.values())

    @property
    def immediate(self) -> float:
        """Share of the requests that were admitted at once; NaN without requests."""
        return self.at_once / self.admitted if self.admitted else math.nan

    def per_step_us(self, name: str) -> float:
        """Return the mean `compute` or `wait` of a step on its shard; NaN if there was no step."""
        steps = self.shards["steps"]
        return self.shards[f"{name}_seconds"] / steps * 1e6 if steps else math.nan

    @property
    def named(self) -> list[str]:
        """Adapters with a line of their own that were called, the most often first."""
        own = (name for name, (calls, _) in self.holds.items() if name != OTHER and calls)
        return sorted(own, key=lambda name: -self.holds[name][0])

    def workload(self, lengths: Lengths) -> Workload:
        """Derive popularity and presence. Adapters without a line share the calls of `(other)` evenly: the worst case.

        A server sees no output lengths, but for how long adapters are held: `lengths` stand for the mean.
        """
        names = [name for name in self.holds if name != OTHER]
        calls, seconds = self.holds.get(OTHER, (0.0, 0.0))
        rest = max(self.registered - len(names), 1 if calls else 0)
        calls_N = np.array([*(self.holds[name][0] for name in names), *[calls / max(rest, 1)] * rest])
        held_N: Floats = np.array([*(self.holds[name][1] for name in names), *[seconds / max(rest, 1)] * rest])
        tokens_N = held_N / np.maximum(calls_N, 1e-12) * lengths.mean_tokens / self.held_s
        every = (*names, *(f"(other {index})" for index in range(1, rest + 1)))
        return Workload(
            popularity=calls_N / calls_N.sum(), tokens=tokens_N, lengths=lengths, names=every, source="measured"
        )


def between(scrapes: Sequence[Scrape]) -> Measured:
    """Sum the counts from the first scrape to the last; with one scrape, since the server's start."""
    if len(scrapes) == 1:
        return _since(None, scrapes[0])
    return _summed([_since(*pair) for pair in pairwise(scrapes)])


def by_hour(scrapes: Sequence[Scrape]) -> dict[int, Measured]:
    """Measure each hour of the day (UTC) by its fullest interval; refuses intervals of over an hour."""
    return {hour: max(parts, key=lambda one: one.in_flight) for hour, parts in _hours(scrapes).items()}


def usual(scrapes: Sequence[Scrape]) -> dict[int, Measured]:
    """Sum what was measured at each hour of the day (UTC), over all days: what that hour may be like next time."""
    return {hour: _summed(parts) for hour, parts in _hours(scrapes).items()}


def next_hour(scrapes: Sequence[Scrape]) -> int:
    """Return the hour of the day (UTC) after that of the last scrape."""
    return int(scrapes[-1].at % _DAY_SECONDS // 3600 + 1) % 24


def _hours(scrapes: Sequence[Scrape]) -> dict[int, list[Measured]]:
    found: dict[int, list[Measured]] = {}
    for earlier, later in pairwise(scrapes):
        if later.at - earlier.at > _MOST_GAP_SECONDS:
            continue
        one = _since(earlier, later)
        if one.requests:
            found.setdefault(int((earlier.at + later.at) / 2 % _DAY_SECONDS // 3600), []).append(one)
    return dict(sorted(found.items()))


def _since(earlier: Scrape | None, later: Scrape) -> Measured:
    resets = 0 if earlier is None else sum(_fell(earlier, later, name) for name in _MARKS)

    def grown(name: str, **labels: str) -> float:
        return sum(
            _growth(0.0 if earlier is None else earlier.of(name).get(found, 0.0), value)
            for found, value in later.of(name).items()
            if set(labels.items()) <= set(found)
        )

    def adapters(what: str) -> dict[str, float]:
        return {dict(labels)["adapter"]: grown(f"{HOLDS}_{what}", **dict(labels)) for labels in later.of(_CALLS)}

    if earlier is not None and not later.at > earlier.at:
        raise InputError("two scrapes have the same time; record them in separate files")
    calls, seconds = adapters("count"), adapters("sum")
    built = next((dict(labels) for labels in later.of(BUILD)), {})
    queue = later.total(QUEUE) - (0.0 if earlier is None else earlier.total(QUEUE))
    at_once = grown(ADMITTED, kind="immediate")
    return Measured(
        seconds=math.nan if earlier is None else later.at - earlier.at,
        registered=int(later.total(REGISTERED)),
        holds={name: (calls[name], seconds.get(name, 0.0)) for name in calls},
        admitted=at_once + grown(ADMITTED, kind="queued") + max(queue, 0.0),
        at_once=at_once,
        waited_seconds=grown(WAITED),
        shards={name: grown(f"lora_server_{name}_total") for name in SHARD_SUMS},
        resets=int(resets > 0),
        server=ServerBuild(*(built.get(name, "") for name in ServerBuild._fields)),
    )


_CALLS = f"{HOLDS}_count"
_MARKS = (ADMITTED, "lora_server_steps_total")  # where these fell, a controller or a shard started anew


def _fell(earlier: Scrape, later: Scrape, name: str) -> bool:
    return any(later.of(name).get(labels, value) < value for labels, value in earlier.of(name).items())


def _growth(before: float, now: float) -> float:
    return now - before if now >= before else now


def _summed(parts: Sequence[Measured]) -> Measured:
    holds: dict[str, tuple[float, float]] = {}
    for part in parts:
        for name, (calls, seconds) in part.holds.items():
            before = holds.get(name, (0.0, 0.0))
            holds[name] = before[0] + calls, before[1] + seconds
    return Measured(
        seconds=sum(part.seconds for part in parts),
        registered=parts[-1].registered,
        holds=holds,
        admitted=sum(part.admitted for part in parts),
        at_once=sum(part.at_once for part in parts),
        waited_seconds=sum(part.waited_seconds for part in parts),
        shards={name: sum(part.shards[name] for part in parts) for name in SHARD_SUMS},
        resets=sum(part.resets for part in parts),
        server=parts[-1].server,
    )
