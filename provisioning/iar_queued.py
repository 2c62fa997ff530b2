"""`queued`: the working set with its waiting requests, for caches that are short of room.

Adapter i goes round: absent for 1/l_i on average, waiting for W if no slot is free, then active (in
a slot, with requests in flight) for B_i = (e^l - 1)/l, the busy period of its requests, times in
units of the mean service time. So the shares of time are

    active r_i = B_i / C_i,   waiting w_i = W / C_i,   absent a_i = (1/l_i) / C_i,   C_i = 1/l_i + W + B_i

and a request (Poisson arrivals see time averages) is not admitted at once if its adapter waits, or
is absent while M others are present:   miss = sum_i p_i [w_i + a_i P(K_i >= M)].
It is the cold adapters that wait: a hot one hardly ever leaves, which `offered` does not know.

One W serves all. Little's law over adapters, E[(K - M)+] = W sum_i l_i a_i, gives it, with the law of
the number K of present adapters taken in two ways, each of which sees what the other does not:

    mean field    Poisson-binomial of r + w: a fixed point in W. Good where the hot dominate.
    birth-death   Poisson-binomial of the offered q, where beyond M only M of k can leave:
                  P(k+1)/P(k) is multiplied by (k+1)/M. For many cold adapters it is Erlang's M/M/M
                  queue, whose tail is longer than any mean-field one.

The lower IAR of the two is returned. Errors against simulation: `docs/provisioning.md`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from scipy.optimize import brentq
from scipy.special import gammaln

from provisioning.iar_models import admitted
from provisioning.poisson_binomial import Floats, PoissonBinomial, leave_one_out, poisson_binomial

_NO_WAIT = 1e-12
_HOTTEST = (
    300.0  # a rate beyond which a busy period outlasts everything; well below _LONGEST, so that waits can match it
)
_LONGEST = 600.0  # in ln(1 + wait)
_NOISE = 1e-15


def queued(p_N: Floats, global_batch: float, cache_slots: int) -> float:
    """The lower of the two approximations; 0 without slots, 1 where all fit."""
    called = int(np.count_nonzero(p_N))
    if cache_slots == 0 or cache_slots >= called:
        return admitted(0.0, cache_slots, called)
    p_N = p_N[p_N > 0]
    rates_N = np.maximum(global_batch * p_N, 1e-300)
    missed = max(_mean_field(p_N, rates_N, cache_slots), _birth_death(p_N, rates_N, cache_slots))
    return admitted(missed, cache_slots, called)


def reaches(p_N: Floats, global_batch: float, cache_slots: int, target: float) -> bool:
    """queued(...) >= target, without the costlier of the two where the other already says no."""
    called = int(np.count_nonzero(p_N))
    if 0 < cache_slots < called:
        positive_N = p_N[p_N > 0]
        rates_N = np.maximum(global_batch * positive_N, 1e-300)
        if admitted(_birth_death(positive_N, rates_N, cache_slots), cache_slots, called) < target:
            return False
    return queued(p_N, global_batch, cache_slots) >= target


def cycle_shares(rates_N: Floats, wait: float) -> tuple[Floats, Floats]:
    """(active, waiting) shares of time. Requests that gather during the wait start together, which
    lengthens the busy period by about ln(1 + l W / 2)."""
    rates_N = np.minimum(rates_N, _HOTTEST)
    busy_N = np.expm1(rates_N) / rates_N + np.log1p(rates_N * wait / 2)
    cycle_N = 1 / rates_N + wait + busy_N
    return busy_N / cycle_N, wait / cycle_N


def _mean_field(p_N: Floats, rates_N: Floats, cache_slots: int) -> float:
    def surplus(wait: float) -> float:
        active_N, waiting_N = cycle_shares(rates_N, wait)
        present_N = active_N + waiting_N
        absent_rate = float(rates_N @ (1 - present_N))
        return poisson_binomial(present_N).excess(cache_slots) - wait * absent_rate

    present_N = cycle_shares(rates_N, 0.0)[0]
    at_least = _least(poisson_binomial(present_N).excess(cache_slots), float(rates_N @ (1 - present_N)))
    active_N, waiting_N = cycle_shares(rates_N, _root(surplus, at_least))
    q_N = active_N + waiting_N
    first, others_RK = leave_one_out(poisson_binomial(q_N), q_N, (p_N * (1 - q_N))[None])
    return float(p_N @ waiting_N + others_RK[0, max(cache_slots - first, 0) :].sum())


def _birth_death(p_N: Floats, rates_N: Floats, cache_slots: int) -> float:
    q_N = -np.expm1(-rates_N)
    whole = poisson_binomial(q_N)
    slowed_K = _slowed(whole.first, whole.pmf, cache_slots)
    anchor = float(slowed_K.max())
    law_K = np.exp(slowed_K - anchor)
    mass = float(law_K.sum())
    excess = PoissonBinomial(whole.first, law_K / mass).excess(cache_slots)

    def surplus(wait: float) -> float:
        return excess - float(cycle_shares(rates_N, wait)[1].sum())

    at_least = _least(excess, float(rates_N @ (1 - q_N)))
    active_N, waiting_N = cycle_shares(rates_N, _root(surplus, at_least))
    absent_N = np.maximum(1 - active_N - waiting_N, 0.0)
    first, others_RK = leave_one_out(whole, q_N, (p_N * absent_N)[None])
    others_K = np.exp(np.minimum(_slowed(first, others_RK[0], cache_slots) - anchor, 0.0))
    taken = min(float(others_K[max(cache_slots - first, 0) :].sum()) / mass, float(p_N @ absent_N))
    return float(p_N @ waiting_N) + taken


def _slowed(first: int, law_K: Floats, cache_slots: int) -> Floats:
    """ln of law[k] * prod_{j = M+1..k} j / M: k present of whom only M can leave. Rounding noise is left out."""
    counts_K = np.maximum(first + np.arange(law_K.size), cache_slots)
    growth_K = gammaln(counts_K + 1) - gammaln(cache_slots + 1) - (counts_K - cache_slots) * np.log(cache_slots)
    log_law_K = np.log(np.where(law_K > _NOISE, law_K, 1.0))
    return np.where(law_K > _NOISE, log_law_K + growth_K, -np.inf)


def _least(excess: float, absent_rate: float) -> float:
    """A lower bound of the wait: absence, and with it the rate that Little's law divides by, only shrinks."""
    return min(excess / max(absent_rate, 1e-250), math.expm1(_LONGEST) / 4)


def _root(surplus: Callable[[float], float], at_least: float) -> float:
    """The wait, `at_least` or longer, at which a falling surplus is zero; sought in ln(1 + wait), as hot
    adapters stay for e^l."""
    if at_least <= _NO_WAIT:
        return 0.0

    def in_logs(size: float) -> float:
        return surplus(math.expm1(size))

    low = math.log1p(at_least * (1 - 1e-9))
    high = math.log1p(2 * at_least)
    while high < _LONGEST and in_logs(high) > 0:
        low, high = high, min(2 * high, _LONGEST)
    if high == _LONGEST and in_logs(high) > 0:
        return math.expm1(_LONGEST)
    if in_logs(low) <= 0:
        return math.expm1(low)
    return math.expm1(float(brentq(in_logs, low, high, xtol=1e-13, rtol=1e-9)))
