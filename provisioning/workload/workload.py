"""Workloads: calls of adapters, their times and their tokens.

A `Workload` is what the models need (popularity, burstiness, lengths) and can be sampled with a
seed; `Requests` is a sequence of calls, sampled or read from a trace. Readers are in `traces` and
`servegen`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import numpy as np

from provisioning.arrays import Floats
from provisioning.inputs import count, non_negative, normalised
from provisioning.workload.days import DayProcess
from provisioning.workload.replay import LoadOverTime, WindowMix, about_peak, marked, mixes, over_time
from provisioning.workload.requests import Lengths, Requests, renewal_gaps


@dataclass(frozen=True, eq=False, kw_only=True)
class Workload:
    """Popularity p_i, lengths and burstiness (CV of the gaps between arrivals, 1 = Poisson).

    `tokens` are the mean output tokens of each adapter where they are known; `trace` is replayed, and `generate`
    makes one of about so many calls from a seed. `given_rate` is the mean over all time, and `over_time` says how
    much fuller the window is that is sized for, of which `popularity` is where the source tells. `ranks` says what
    the adapters are, where they were read.
    """

    popularity: Floats
    tokens: Floats | None = None
    lengths: Lengths = field(default_factory=Lengths)
    cv: float = 1.0
    source: str = "given"
    given_rate: float | None = None
    trace: Requests | None = None
    generate: Callable[[int, int], Requests] | None = None
    over_time: LoadOverTime | None = None
    zipf_skew: float | None = None
    names: tuple[str, ...] = ()
    ranks: str = ""

    def name(self, index: int) -> str:
        """Return an adapter's name; where the source has none, its rank of popularity from 1 on."""
        return self.names[index] if self.names else f"adapter-{index + 1}"

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

    @property
    def peak(self) -> float:
        """Load of the window that is sized for, over the mean load; 1 where the load is steady."""
        return 1.0 if self.over_time is None else self.over_time.peak

    @cached_property
    def in_flight(self) -> Floats:
        """Shares of the requests in flight: longer outputs stay longer."""
        return self.popularity if self.tokens is None else normalised(self.popularity * self.tokens, "tokens")

    def with_mean_tokens(self, mean: float) -> Workload:
        """Scale all outputs by one factor to this mean."""
        factor = mean / self.lengths.mean_tokens
        if self.trace is None:
            tokens = None if self.tokens is None else self.tokens * factor
            generate = None if self.generate is None else partial(_longer, self.generate, factor)
            return replace(self, lengths=replace(self.lengths, mean_tokens=mean), tokens=tokens, generate=generate)
        trace = self.trace.stretched_to(mean)
        tokens = None if self.tokens is None else trace.mean_tokens()
        return replace(self, trace=trace, tokens=tokens, lengths=Lengths.of(trace.output_tokens, self.lengths.source))

    def sized_for(self, window_s: float | None) -> Workload:
        """Return the workload with its trace's load over time and the peak's calls marked; itself without a trace."""
        if self.trace is None:
            return self
        found = over_time(self.trace, window_s)
        return replace(self, over_time=found, trace=marked(self.trace, found))

    def calls(self, *, tokens_per_s: float, num: int, seed: int) -> Requests:
        """Draw about `num` calls at a rate of `tokens_per_s`, at the peak if there is one.

        Of a trace, seed 0 gives the very trace, and others days of the process that is fitted to it, with peaks
        that are higher or lower. Where it names no adapters, these are drawn anew.
        """
        if self.generate is not None:
            made = self.generate(num, seed)
            return made.slowed(made.mean_rate() * float(made.output_tokens.mean()) / tokens_per_s)
        if self.trace is None:
            return self.sample(rate=tokens_per_s / self.lengths.mean_tokens, num_requests=num, seed=seed)
        trace = self.trace
        own = trace.mean_rate() * float(trace.output_tokens.mean()) * self.peak
        if seed:
            trace = self._day(seed)
        if seed and not trace.names:
            drawn = np.random.default_rng(seed).choice(self.num_adapters, len(trace), p=self.popularity)
            trace = replace(trace, adapter=drawn.astype(np.int64))
        return about_peak(trace, num, seed).slowed(own / tokens_per_s)

    def _day(self, seed: int) -> Requests:
        day, over = self._days.day(seed), self.over_time
        return day if over is None or over.steady else marked(day, over_time(day, over.window_s))

    @cached_property
    def mixes(self) -> tuple[WindowMix, ...]:
        """The mix of adapters of each window of a trace; none where it does not change by more than chance."""
        return () if self.trace is None or self.over_time is None else mixes(self.trace, self.over_time)

    @cached_property
    def _days(self) -> DayProcess:
        assert self.trace is not None
        return DayProcess.of(self.trace)

    def sample(self, *, rate: float, num_requests: int, seed: int) -> Requests:
        """Sample calls at `rate` requests/s from popularity and lengths; the same seed gives the same calls."""
        rng = np.random.default_rng(seed)
        arrival_s = np.cumsum(renewal_gaps(rng, self.cv, num_requests)) / rate
        adapter = rng.choice(self.num_adapters, num_requests, p=self.popularity)
        lengths = self.lengths.sample(rng, num_requests)
        if self.tokens is not None:
            longer = lengths * self.tokens[adapter] / self.lengths.mean_tokens
            lengths = np.maximum(np.rint(longer), 1).astype(np.int64)
        return Requests(
            arrival_s=arrival_s,
            adapter=adapter.astype(np.int64),
            output_tokens=lengths,
            num_adapters=self.num_adapters,
        )


def _longer(generate: Callable[[int, int], Requests], factor: float, num: int, seed: int) -> Requests:
    made = generate(num, seed)
    return made.stretched_to(float(made.output_tokens.mean()) * factor)


def zipf(skew: float, num_adapters: int) -> Floats:
    """Return p_i proportional to 1 / i^skew, i = 1..N; 0 is uniform."""
    ranks = np.arange(1, count(num_adapters, "adapters", 1) + 1, dtype=float)
    return normalised(ranks ** -non_negative(skew, "zipf"))
