"""Algorithm 1 of the paper, word for word: O(N^3) per cache size. Slow and obvious, for the tests.

Departs from the text in what the text leaves open, as `admissibility` does: the threshold is continuous,
Pr[Poisson(lambda) > tau] = P(tau + 1, lambda); the IAR is 0 without slots; and where every adapter
that is ever called fits, all of them are resident.
"""

from __future__ import annotations

import numpy as np
from scipy.special import gammainc

from provisioning.arrays import Floats


def leave_one_out_pmf(q_N: Floats, left_out: int) -> Floats:
    """Run lines 9-15: the dynamic program over all adapters but one."""
    dp = np.zeros(q_N.size + 1)
    dp[0] = 1.0
    for j in range(q_N.size):
        if j != left_out:
            dp[1:] = dp[1:] * (1 - q_N[j]) + dp[:-1] * q_N[j]
            dp[0] *= 1 - q_N[j]
    return dp


def threshold(rates_N: Floats, cache_slots: int) -> float:
    """Run line 5: find by bisection the tau at which the expected number of residents is the cache size."""
    low, high = 1e-12, 1.0
    while gammainc(high, rates_N).sum() > cache_slots:
        high *= 2
    for _ in range(400):
        middle = (low * high) ** 0.5 if high > 2 * low else (low + high) / 2
        if gammainc(middle, rates_N).sum() > cache_slots:
            low = middle
        else:
            high = middle
    return high - 1


def literal(p_N: Floats, global_batch: float, cache_slots: int) -> float:
    """Compute IAR(M) by Eq. 2-4."""
    if cache_slots == 0:
        return 0.0
    rates_N = global_batch * p_N
    if cache_slots >= np.count_nonzero(rates_N):
        q_N = (rates_N > 0).astype(float)
    else:
        q_N = gammainc(threshold(rates_N, cache_slots) + 1, rates_N)
        q_N[rates_N == 0] = 0.0
    total = 0.0
    for i in range(p_N.size):
        free = leave_one_out_pmf(q_N, i)[:cache_slots].sum()
        total += p_N[i] * (q_N[i] + (1 - q_N[i]) * free)
    return float(total)


def offered(p_N: Floats, global_batch: float, cache_slots: int, q_N: Floats | None = None) -> float:
    """Compute IAR(M) of the offered working set; slots are shared when it does not fit."""
    q_N = 1 - np.exp(-global_batch * p_N) if q_N is None else q_N
    admitted = np.minimum(1.0, cache_slots / (np.arange(p_N.size + 1) + 1.0))
    total = 0.0
    for i in range(p_N.size):
        others = leave_one_out_pmf(q_N, i)
        total += p_N[i] * (q_N[i] * (others @ admitted) + (1 - q_N[i]) * others[:cache_slots].sum())
    return float(total)


def literal_min(p_N: Floats, global_batch: float, target: float) -> int:
    """Run the loop of Algorithm 1: return the first M that reaches the target."""
    for cache_slots in range(1, p_N.size + 1):
        if literal(p_N, global_batch, cache_slots) >= target:
            return cache_slots
    return int(p_N.size)
