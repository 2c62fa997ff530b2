"""Who calls which adapter, when, and for how many tokens.

A `Workload` is what the models need (popularity, burstiness, lengths) and can be sampled with a
seed; `Requests` is a sequence of calls, sampled or read from a trace. Readers are in `traces` and
`servegen`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from provisioning.arrays import Floats, Ints
from provisioning.inputs import InputError, count, non_negative, normalised, positive
from provisioning.workload.requests import Lengths, Requests, renewal_gaps

__all__ = [
    "Lengths",
    "Requests",
    "Workload",
    "from_counts",
    "from_requests",
    "littles_law_batch",
    "zipf",
]


@dataclass(frozen=True, eq=False, kw_only=True)
class Workload:
    """Popularity p_i, lengths and burstiness (CV of the gaps between arrivals, 1 = Poisson).

    `cv` is one number for the whole stream, or one per adapter, each then an own renewal process.
    """

    popularity: Floats
    lengths: Lengths = field(default_factory=Lengths)
    cv: float | Floats = 1.0
    source: str = "given"
    given_rate: float | None = None
    trace: Requests | None = None
    zipf_skew: float | None = None

    @property
    def own_rate(self) -> float | None:
        """Requests/s that the source itself has: the trace's, or `given_rate`; None where it has none."""
        if self.trace is not None:
            return self.trace.mean_rate()
        return self.given_rate

    @property
    def num_adapters(self) -> int:
        """N, those never called included."""
        return int(self.popularity.size)

    def sample(self, *, rate: float, num_requests: int, seed: int) -> Requests:
        """About `num_requests` calls at `rate` requests/s; the same seed gives the same calls."""
        rng = np.random.default_rng(seed)
        if isinstance(self.cv, np.ndarray):
            arrival_s, adapter = self._own_processes(rng, rate, num_requests)
        else:
            arrival_s = np.cumsum(renewal_gaps(rng, self.cv, num_requests)) / rate
            adapter = rng.choice(self.num_adapters, num_requests, p=self.popularity)
        return Requests(
            arrival_s=arrival_s,
            adapter=adapter.astype(np.int64),
            output_tokens=self.lengths.sample(rng, arrival_s.size),
            num_adapters=self.num_adapters,
        )

    def _own_processes(self, rng: np.random.Generator, rate: float, num_requests: int) -> tuple[Floats, Ints]:
        horizon_s, times, owners = num_requests / rate, [], []
        for index in np.flatnonzero(self.popularity):
            mean_gap_s = 1 / (rate * self.popularity[index])
            cv = float(np.asarray(self.cv)[index])
            expected = horizon_s / mean_gap_s
            gaps = renewal_gaps(rng, cv, int(expected + 6 * max(cv, 1) * np.sqrt(expected) + 10)) * mean_gap_s
            own = np.cumsum(gaps) - rng.random() * gaps[0]
            own = own[own < horizon_s]
            times.append(own)
            owners.append(np.full(own.size, index))
        arrival_s = np.concatenate(times)
        order = np.argsort(arrival_s, kind="stable")
        return arrival_s[order], np.concatenate(owners)[order]


def zipf(skew: float, num_adapters: int) -> Floats:
    """p_i proportional to 1 / i^skew, i = 1..N; 0 is uniform."""
    ranks = np.arange(1, count(num_adapters, "adapters", 1) + 1, dtype=float)
    return normalised(ranks ** -non_negative(skew, "zipf"))


def from_counts(counts: Sequence[float] | dict[str, float], name: str = "counts") -> Floats:
    """p_i in proportion to calls counted per adapter, in the order given; `name` is for the error."""
    return normalised(list(counts.values()) if isinstance(counts, dict) else counts, name)


def littles_law_batch(*, request_rate: float, mean_output_tokens: float, tpot_s: float) -> float:
    """LB = requests/s times the seconds each decodes: the mean number of requests in flight."""
    rate = positive(request_rate, "--request-rate")
    return rate * positive(mean_output_tokens, "--mean-output-tokens") * positive(tpot_s, "tpot")


def from_requests(requests: Requests, source: str, **options: Any) -> Workload:
    """What a trace says: popularity by count, its output lengths, and itself for replay."""
    if not len(requests):
        raise InputError(f"--trace: {source} holds no requests")
    return Workload(
        popularity=normalised(requests.counts(), "trace"),
        lengths=Lengths.of(requests.output_tokens),
        source=source,
        trace=requests,
        **options,
    )
