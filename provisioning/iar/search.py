"""The smallest M of Algorithm 1, without trying every M.

Eq. 4 under Eq. 3 is not monotone in M: with two hot adapters and many cold ones, one slot leaves
each hot one present half of the time, and a free slot to the cold now and then; two slots are always
taken. So a search may skip M only where a bound says so. For M0 < M <= M1 all q grow with M, hence

    miss(M) >= sum_i p_i (1 - q_i(M1)) P(K_i(M) >= M)     and, each i for itself, one of
    P(K_i(M) >= M) >= P(K_i(M0) >= M1)                    K_i grows with M
    P(K_i(M) >= M) >= 1/2 - 0.56 / sigma_i                Berry-Esseen; the mean of K_i is > M - 1
    P(K_i(M) >= M) >= 1 - Phi(x_i) - skew_i phi(0) / 6 - 0.5 / sigma_i^2,   x_i = (q_i - 1/2) / sigma_i

The last is the normal law with continuity and skewness corrections, used where sigma^2 >= 25. Its
constant is at most 0.31 for equal q (Uspensky 1937) and of that order for any (Deheuvels,
Puri and Ralescu 1989); 0.5 leaves a margin, and a test finds no more than a tenth of it on random q.
sigma and skew are bounded over q in [q(M0), q(M1)].
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy.special import ndtr

from provisioning.arrays import Floats
from provisioning.iar import literal, models
from provisioning.iar.poisson_binomial import PoissonBinomial, leave_one_out, poisson_binomial

_BERRY_ESSEEN, _EDGEWORTH = 0.56, 0.5
_SKEW_PEAK = 0.5 - math.sqrt(1 / 12)  # where q (1-q) (1-2q) is largest
_ROUNDING = 1e-11


@dataclass(frozen=True)
class _Point:
    """Algorithm 1's body at one M; each part is worked out only if it is asked for."""

    p: Floats
    rates: Floats
    weighted: literal.Weighted
    slots: int
    called: int
    known: literal.Known | None = None

    @cached_property
    def log_shape(self) -> float:
        return literal.literal_threshold(self.weighted, self.slots, self.known)

    @cached_property
    def q(self) -> Floats:
        if self.slots >= self.called:
            return (self.rates > 0).astype(float)
        return literal.literal_presence(self.rates, self.log_shape)

    @cached_property
    def whole(self) -> PoissonBinomial:
        return poisson_binomial(self.q)

    @cached_property
    def iar(self) -> float:
        if self.slots >= self.called:
            return 1.0
        missed = literal.literal_missed(self.p, self.q, self.whole, self.slots)
        return models.admitted(missed, self.slots, self.called)

    def at(self, slots: int) -> _Point:
        return _Point(self.p, self.rates, self.weighted, slots, self.called)

    def between(self, end: _Point) -> _Point:
        known = ((end.log_shape, end.slots), (self.log_shape, self.slots)) if end.slots < end.called else None
        return _Point(self.p, self.rates, self.weighted, (self.slots + end.slots) // 2, self.called, known)


def _taken_at_least(low_N: Floats, high_N: Floats) -> Floats:
    """Compute lower bounds of P(K_i(M) >= M) for every i and every q in [low, high], by normal laws."""
    spread_low_N, spread_high_N = low_N * (1 - low_N), high_N * (1 - high_N)
    least = max(float(np.minimum(spread_low_N, spread_high_N).sum()) - 0.25, 1e-300)
    sigma = math.sqrt(least)
    berry_esseen = np.full(low_N.size, max(0.5 - _BERRY_ESSEEN / sigma, 0.0))
    if least < 25:
        return berry_esseen
    straddles_N = (low_N < 0.5) & (high_N > 0.5)
    most = np.where(straddles_N, 0.25, np.maximum(spread_low_N, spread_high_N)).sum()
    third_N = np.maximum(spread_low_N * (1 - 2 * low_N), spread_high_N * (1 - 2 * high_N))
    third_N[(low_N < _SKEW_PEAK) & (high_N > _SKEW_PEAK)] = 0.0963
    skew = max(float(third_N.sum()) + 0.1, 0.0) / sigma**3
    x_N = (high_N - 0.5) / np.where(high_N > 0.5, sigma, math.sqrt(most))
    edgeworth = 1.0 - ndtr(x_N) - skew * 0.39895 / 6 - _EDGEWORTH / least
    return np.asarray(np.maximum(berry_esseen, edgeworth), dtype=np.float64)


def _excluded(low: _Point, high: _Point, target: float) -> bool:
    """Tell whether a bound shows that no M in (low, high] reaches the target."""
    absent_N = low.p * (1 - high.q)
    needed = 1.0 - target + _ROUNDING
    if float(absent_N.sum()) <= needed:
        return False
    if float(absent_N @ _taken_at_least(low.q, high.q)) > needed:
        return True
    if high.slots - low.slots < 2:
        return False
    first, others_RK = leave_one_out(low.whole, low.q, absent_N[None])
    return float(others_RK[0, max(high.slots - first, 0) :].sum()) > needed


def literal_min(p_N: Floats, global_batch: float, target: float) -> int:
    """Find the first M with literal IAR(M) >= target: double the range, and split each range until it is settled."""
    rates_N = global_batch * p_N
    called = max(int(np.count_nonzero(rates_N)), 1)
    low = _Point(p_N, rates_N, literal.condensed(rates_N), 1, called)
    if low.iar >= target:
        return 1
    while low.slots < called:
        high = low.at(min(2 * low.slots, called))
        found = _leftmost(low, high, target)
        if found is not None:
            return found
        low = high
    return called


def _leftmost(low: _Point, high: _Point, target: float) -> int | None:
    """Find the first M in (low, high] that reaches the target."""
    pending = [high]
    while pending:
        end = pending[-1]
        single = end.slots - low.slots == 1
        if _excluded(low, end, target) or (single and end.iar < target):
            low = pending.pop()
        elif single:
            return end.slots
        else:
            pending.append(low.between(end))
    return None
