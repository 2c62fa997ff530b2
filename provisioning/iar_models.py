"""Two of the three admissibility models on validated input. `iar` is the public face.

Legend: N adapters, K window of counts. p are probabilities, rates = LB * p, M = cache_slots.
All of them compute the rate of misses and return 1 minus it.
"""

from __future__ import annotations

import math

import numpy as np

from provisioning.poisson_binomial import Floats, PoissonBinomial, leave_one_out, poisson_binomial

_ALMOST_ONE = math.nextafter(1.0, 0.0)


def admitted(missed: float, cache_slots: int, called: int) -> float:
    """1 - missed; exactly 1 where and only where every adapter that is ever called fits."""
    if cache_slots == 0:
        return 0.0
    if cache_slots >= called:
        return 1.0
    return min(max(1.0 - missed, 0.0), _ALMOST_ONE)


def shared_misses(p_N: Floats, q_N: Floats, whole: PoissonBinomial) -> tuple[int, Floats, Floats]:
    """(first, S0, S1) with miss(M) = S0[M - first] - M S1[M - first] for the presence q.

    From sum_i p_i [q_i E[max(0, 1 - M/(K_i+1))] + (1-q_i) P(K_i >= M)], as tail sums over k >= M.
    """
    first, others_RK = leave_one_out(whole, q_N, np.stack([p_N, p_N * q_N]))
    counts_K = first + np.arange(others_RK.shape[1])
    present_K = others_RK[1] / np.maximum(counts_K + 1, 1)
    return first, _tail_sums(others_RK[0]), _tail_sums(present_K)


def _tail_sums(values_K: Floats) -> Floats:
    return np.append(np.cumsum(values_K[::-1])[::-1], 0.0)


def shared_curve(p_N: Floats, q_N: Floats) -> Floats:
    """IAR(M) for M = 0..N of the working set with presence q, shared when it does not fit."""
    first, tail0, tail1 = shared_misses(p_N, q_N, poisson_binomial(q_N))
    slots = np.arange(p_N.size + 1)
    index = np.clip(slots - first, 0, tail0.size - 1)
    missed = np.minimum.accumulate(tail0[index] - slots * tail1[index])
    curve = np.clip(1.0 - missed, 0.0, _ALMOST_ONE)
    curve[0] = 0.0
    curve[np.count_nonzero(p_N) :] = 1.0
    return curve


def offered_curve(p_N: Floats, global_batch: float) -> Floats:
    """`offered` for M = 0..N: present means that a request is in flight, q = 1 - exp(-lambda)."""
    return shared_curve(p_N, -np.expm1(-global_batch * p_N))


def literal_threshold(rates_N: Floats, cache_slots: int, bracket: tuple[float, float] | None = None) -> float:
    """log(tau* + 1) of Eq. 3 with Pr[Poisson(l) > tau] = P(tau + 1, l); 1 <= M < number of positive rates.

    `bracket`: values known to lie below and above. Without it the root is sought from 1e-12, where
    any positive double is present but for a share below 1e-9, to beyond the largest rate.
    """
    from scipy.optimize import brentq
    from scipy.special import gammainc

    positive_N = rates_N[rates_N > 0]

    def surplus(log_shape: float) -> float:
        return float(gammainc(math.exp(log_shape), positive_N).sum()) - cache_slots

    low, high = bracket or (math.log(1e-12), math.log(float(positive_N.max()) + 2.0))
    while surplus(high) > 0:
        high += 0.5
    while surplus(low) < 0:
        low -= 0.5
    return float(brentq(surplus, low, high, xtol=1e-14, rtol=8.9e-16))


def literal_presence(rates_N: Floats, log_shape: float) -> Floats:
    """q of Eq. 2 at the threshold that `literal_threshold` gives."""
    from scipy.special import gammainc

    return np.asarray(gammainc(math.exp(log_shape), rates_N), dtype=np.float64)


def literal_missed(p_N: Floats, q_N: Floats, whole: PoissonBinomial, cache_slots: int) -> float:
    """sum_i p_i (1 - q_i) P(K_i >= M): what Eq. 4 leaves to 1."""
    first, others_RK = leave_one_out(whole, q_N, (p_N * (1 - q_N))[None])
    return float(others_RK[0, max(cache_slots - first, 0) :].sum())


def literal(p_N: Floats, global_batch: float, cache_slots: int) -> float:
    """Eq. 2-4."""
    rates_N = global_batch * p_N
    called = int(np.count_nonzero(rates_N))
    if cache_slots in (0, p_N.size) or cache_slots >= called:
        return admitted(0.0, cache_slots, called)
    q_N = literal_presence(rates_N, literal_threshold(rates_N, cache_slots))
    return admitted(literal_missed(p_N, q_N, poisson_binomial(q_N), cache_slots), cache_slots, called)
