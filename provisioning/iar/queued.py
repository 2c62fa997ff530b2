"""`queued`: the working set with its waiting requests, for caches that are nearly full.

Adapter i goes round: absent for 1/l_i on average, waiting for W if no slot is free, then active (in
a slot, with requests in flight) for B_i = (e^l - 1)/l, the busy period of its requests, times in
units of the mean service time. So the shares of time are

    active r_i = B_i / C_i,   waiting w_i = W / C_i,   absent a_i = (1/l_i) / C_i,   C_i = 1/l_i + W + B_i

and a request (Poisson arrivals see time averages) is not admitted at once if its adapter waits, or
is absent while M others are present:   miss = sum_i p_i [w_i + a_i P(K_i >= M)].
It is the cold adapters that wait: a hot one hardly ever leaves, which `offered` does not know.

One W serves all. Little's law over adapters, E[(K - M)+] = W sum_i l_i a_i = sum_i w_i, gives it, with
the law of the number K of present adapters taken in two ways, each of which sees what the other does not:

    mean field    Poisson-binomial of r + w: a fixed point in W. Good where the hot dominate.
    birth-death   Poisson-binomial of the offered q, where beyond M only M of k can leave:
                  P(k+1)/P(k) is multiplied by (k+1)/M. For many cold adapters it is Erlang's M/M/M
                  queue, and its tail is longer than any mean-field one.

The lower IAR of the two holds in the long run, which where M or more adapters never go idle takes some e^l
mean service times; no traffic stays the same for that long. Until then the first M adapters that were called
keep the slots; calls of the others, sum_i p_i exp(-u p_i) of all with sum_i (1 - exp(-u p_i)) = M, miss. Each of the
others waits min(W, T) of a horizon of T = 100 service times, W being exponential:

    miss = long run + (W / T) (1 - exp(-T / W)) (first come - long run)+

All three fall as M rises. Errors against simulation: `docs/provisioning.md`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import numpy as np
from scipy.optimize import brentq
from scipy.special import gammaln, logsumexp

from provisioning.arrays import Floats
from provisioning.iar.models import admitted
from provisioning.iar.poisson_binomial import PoissonBinomial, leave_one_out, poisson_binomial

_NO_WAIT = math.log(1e-12)
_NOISE = 1e-15
_TINY = 1e-300
_HORIZON = 100.0
_FOREVER = 30.0  # in ln W
_HOTTEST = 1e5  # of all rates beyond, the busy periods outlast anything


def queued(p_N: Floats, global_batch: float, cache_slots: int) -> float:
    """Compute IAR(M), the lower of the two approximations; 0 without slots, 1 if all adapters fit."""
    return CacheQueue(p_N, global_batch).iar(cache_slots)


class CacheQueue:
    """One popularity and load, to be asked for several cache sizes: each starts from the last one's wait."""

    def __init__(self, p_N: Floats, global_batch: float) -> None:
        self.called = int(np.count_nonzero(p_N))
        self.p_N = p_N[p_N > 0]
        self.rates_N = np.clip(global_batch * self.p_N, _TINY, _HOTTEST)
        self.q_N = -np.expm1(-self.rates_N)
        self._log_absent_rate = float(logsumexp(np.log(self.rates_N) - self.rates_N))
        self.offered = poisson_binomial(self.q_N)
        self.spread = float(np.sqrt(self.q_N @ (1 - self.q_N)))
        self._waits: dict[int, float] = {}  # ln W of the mean field at the cache sizes asked for

    def iar(self, cache_slots: int) -> float:
        """Compute IAR(M). It does not fall as M rises, because all waits fall."""
        if cache_slots == 0 or cache_slots >= self.called:
            return admitted(0.0, cache_slots, self.called)
        missed = max(self._birth_death(cache_slots), self._mean_field(cache_slots))
        waits = math.exp(min(self._waits[cache_slots], _FOREVER)) / _HORIZON
        lasting = -waits * math.expm1(-1 / waits) if waits > 0 else 0.0
        missed += lasting * max(first_come_misses(self.p_N, cache_slots) - missed, 0.0)
        return admitted(missed, cache_slots, self.called)

    def _mean_field(self, cache_slots: int) -> float:
        def surplus(log_wait: float) -> float:
            active_N, waiting_N, _ = cycle_shares(self.rates_N, log_wait)
            return poisson_binomial(active_N + waiting_N).excess(cache_slots) - float(waiting_N.sum())

        excess = self.offered.excess(cache_slots)
        log_wait = self._waits[cache_slots] = self._log_wait(surplus, excess, *self._guess(cache_slots))
        active_N, waiting_N, absent_N = cycle_shares(self.rates_N, log_wait)
        present_N = active_N + waiting_N
        first, others_RK = leave_one_out(poisson_binomial(present_N), present_N, (self.p_N * absent_N)[None])
        return float(self.p_N @ waiting_N + others_RK[0, max(cache_slots - first, 0) :].sum())

    def _birth_death(self, cache_slots: int) -> float:
        whole = self.offered
        slowed_K = _slowed(whole.first, whole.pmf, cache_slots)
        anchor = float(slowed_K.max())
        law_K = np.exp(slowed_K - anchor)
        mass = float(law_K.sum())
        excess = PoissonBinomial(whole.first, law_K / mass).excess(cache_slots)

        def surplus(log_wait: float) -> float:
            return excess - float(cycle_shares(self.rates_N, log_wait)[1].sum())

        log_wait = self._log_wait(surplus, excess)
        _, waiting_N, absent_N = cycle_shares(self.rates_N, log_wait)
        first, others_RK = leave_one_out(whole, self.q_N, (self.p_N * absent_N)[None])
        others_K = np.exp(np.minimum(_slowed(first, others_RK[0], cache_slots) - anchor, 0.0))
        taken = min(float(others_K[max(cache_slots - first, 0) :].sum()) / mass, float(self.p_N @ absent_N))
        return float(self.p_N @ waiting_N) + taken

    def _guess(self, cache_slots: int) -> tuple[float, float]:
        """Guess (ln W, how far off it may be) from the waits at the nearest cache sizes: W falls as M rises."""
        fewer = max((m for m in self._waits if m < cache_slots), default=None)
        more = min((m for m in self._waits if m > cache_slots), default=None)
        if fewer is None or more is None or math.isinf(self._waits[more]):
            return max(self._waits.values(), default=-math.inf), 0.7
        high, low = self._waits[fewer], self._waits[more]
        share = (math.log(cache_slots) - math.log(fewer)) / (math.log(more) - math.log(fewer))
        return high + share * (low - high), max(0.1 * (high - low), 1e-3)

    def _log_wait(
        self, surplus: Callable[[float], float], excess: float, guess: float = -math.inf, stride: float = 0.7
    ) -> float:
        """Find ln W at which a falling surplus is zero, -inf for none; search from `guess` on, if that is not too low.

        Waits only lower the rate sum l a that Little's law divides by: W is `excess` over its offered value, or more.
        """
        least = math.log(max(excess, _TINY)) - self._log_absent_rate
        if least <= _NO_WAIT:
            return -math.inf
        return _falling_root(cache(surplus), least, max(guess, least), stride)


def _falling_root(surplus: Callable[[float], float], least: float, guess: float, stride: float) -> float:
    """Find the root of a function that is not negative at `least`: bracket by doubling, then Brent's method."""
    low = high = guess
    if surplus(guess) > 0:
        while surplus(high) > 0:
            low, high, stride = high, high + stride, stride * 2
    else:
        while low > least and surplus(low) <= 0:
            low, high, stride = max(low - stride, least), low, stride * 2
        if surplus(low) <= 0:
            return low
    return float(brentq(surplus, low, high, xtol=1e-13, rtol=8.9e-16))


def cycle_shares(rates_N: Floats, log_wait: float) -> tuple[Floats, Floats, Floats]:
    """Compute (active, waiting, absent) shares of time, by logarithms: a hot adapter's busy period is e^l.

    Requests that gather during the wait start together, which lengthens the busy period by about ln(1 + l W / 2).
    """
    log_rates_N = np.log(rates_N)
    gathered_N = np.log(np.maximum(np.logaddexp(0.0, log_rates_N + (log_wait - math.log(2))), _TINY))
    busy_N = np.logaddexp(rates_N + np.log(-np.expm1(-rates_N)) - log_rates_N, gathered_N)
    cycle_N = np.logaddexp(np.logaddexp(-log_rates_N, log_wait), busy_N)
    return np.exp(busy_N - cycle_N), np.exp(log_wait - cycle_N), np.exp(-log_rates_N - cycle_N)


def _slowed(first: int, law_K: Floats, cache_slots: int) -> Floats:
    """Compute ln of law[k] * prod_{j = M+1..k} j / M: k are present, only M can leave. Drops rounding noise."""
    counts_K = np.maximum(first + np.arange(law_K.size), cache_slots)
    growth_K = gammaln(counts_K + 1) - gammaln(cache_slots + 1) - (counts_K - cache_slots) * np.log(cache_slots)
    log_law_K = np.log(np.where(law_K > _NOISE, law_K, 1.0))
    return np.where(law_K > _NOISE, log_law_K + growth_K, -np.inf)


def first_come_misses(p_N: Floats, cache_slots: int) -> float:
    """Return the share of calls for adapters without a slot, for 0 < M < N, if the first M called keep the slots.

    After u calls adapter i is in with probability 1 - exp(-u p_i), and M are at the u where these sum to M.
    """

    def surplus(log_calls: float) -> float:
        return float(-np.expm1(-math.exp(log_calls) * p_N).sum()) - cache_slots

    return float(p_N @ np.exp(-math.exp(_rising_root(surplus)) * p_N))


def first_come_slots(p_N: Floats, missed: float) -> float:
    """Return the M, a real number, at which `first_come_misses` is `missed`, a share between 0 and 1."""

    def surplus(log_calls: float) -> float:
        return missed - float(p_N @ np.exp(-math.exp(log_calls) * p_N))

    return float(-np.expm1(-math.exp(_rising_root(surplus)) * p_N).sum())


def _rising_root(rising: Callable[[float], float]) -> float:
    low, high = 0.0, 1.0
    while rising(high) < 0:
        low, high = high, high + 1.0
    while rising(low) > 0:
        low -= 1.0
    return float(brentq(rising, low, high, xtol=1e-12))
