"""A sequence of calls, and the laws that lengths and gaps are drawn from."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from provisioning.arrays import Floats, Ints
from provisioning.inputs import InputError


@dataclass(frozen=True, eq=False, kw_only=True)
class Requests:
    """Calls in order of arrival; `adapter` indexes adapters 0..num_adapters-1, in `names` where known.

    `at_peak` marks those of the window that the plan is sized for, where the load varies.
    """

    arrival_s: Floats
    adapter: Ints
    output_tokens: Ints
    num_adapters: int
    input_tokens: Ints | None = None
    names: tuple[str, ...] = ()
    at_peak: NDArray[np.bool_] | None = None

    def __len__(self) -> int:
        return int(self.arrival_s.size)

    def counts(self) -> Ints:
        """Count the calls of each adapter."""
        return np.bincount(self.adapter, minlength=self.num_adapters)

    @property
    def span_s(self) -> float:
        """Seconds from the first arrival to the last."""
        return float(self.arrival_s[-1] - self.arrival_s[0]) if len(self) else 0.0

    def mean_rate(self) -> float:
        """Return requests/s over the span; raises InputError if all came at once."""
        if self.span_s <= 0:
            raise InputError("--trace: all requests have one timestamp, so that no rate follows; give distinct ones")
        return (len(self) - 1) / self.span_s

    def mean_tokens(self) -> Floats:
        """Return the mean output tokens of each adapter's calls; 0 without calls."""
        sums = np.bincount(self.adapter, self.output_tokens, self.num_adapters)
        return np.asarray(sums / np.maximum(self.counts(), 1))

    def slowed(self, factor: float) -> Requests:
        """Shift the calls to begin at 0 and stretch time by a factor."""
        return replace(self, arrival_s=(self.arrival_s - self.arrival_s[0]) * factor)

    def part(self, index: slice | Ints) -> Requests:
        """Select some of the calls, in the order of `index`."""
        return replace(
            self,
            arrival_s=self.arrival_s[index],
            adapter=self.adapter[index],
            output_tokens=self.output_tokens[index],
            input_tokens=None if self.input_tokens is None else self.input_tokens[index],
            at_peak=None if self.at_peak is None else self.at_peak[index],
        )

    def stretched_to(self, mean_tokens: float) -> Requests:
        """Scale all outputs by one factor to this mean, but for rounding."""
        longer = np.maximum(self.output_tokens, 1) * (mean_tokens / np.maximum(self.output_tokens, 1).mean())
        return replace(self, output_tokens=np.maximum(np.rint(longer), 1).astype(np.int64))


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Output lengths: log-normal with a mean and a coefficient of variation, or drawn from `observed`.

    `source` says where the mean was seen; it is empty where it is assumed.
    """

    mean_tokens: float = 256.0
    cv: float = 1.0
    source: str = ""
    observed: tuple[int, ...] = field(default=(), repr=False)

    @classmethod
    def of(cls, output_tokens: Ints, source: str) -> Lengths:
        """Make the lengths seen in a trace."""
        values = np.maximum(output_tokens, 1)
        return cls(
            mean_tokens=float(values.mean()),
            cv=float(values.std() / values.mean()),
            source=source,
            observed=tuple(map(int, values)),
        )

    def sample(self, rng: np.random.Generator, num: int) -> Ints:
        """Sample output lengths of at least one token."""
        if self.observed:
            return rng.choice(np.asarray(self.observed, dtype=np.int64), num)
        if self.cv == 0:
            return np.full(num, max(round(self.mean_tokens), 1), dtype=np.int64)
        spread = np.log1p(self.cv**2)
        drawn = rng.lognormal(np.log(self.mean_tokens) - spread / 2, np.sqrt(spread), num)
        return np.maximum(np.rint(drawn), 1).astype(np.int64)


_METRONOME = 1e-6


def renewal_gaps(rng: np.random.Generator, cv: float, num: int) -> Floats:
    """Draw gaps with mean 1 from a Gamma law with the coefficient of variation `cv`; 0, or nearly, gives equal gaps."""
    if cv < _METRONOME:
        return np.ones(num)
    if cv == 1:
        return rng.exponential(size=num)
    return rng.gamma(1 / cv**2, cv**2, num)
