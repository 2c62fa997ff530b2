"""`literal`: Eq. 2-4 of the paper on the continuous extension of Eq. 2, on validated input.

Legend: N adapters, K window of counts. p are probabilities, rates = LB * p, M = cache_slots.
"""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
from scipy.optimize import brentq
from scipy.special import gammainc

from provisioning.arrays import Floats
from provisioning.iar.models import admitted
from provisioning.iar.poisson_binomial import PoissonBinomial, leave_one_out, poisson_binomial

_FEW = 4096  # rates up to which each stands for itself
_WIDTH, _POINTS = 0.4, 10
Known = tuple[tuple[float, int], tuple[float, int]]
Weighted = tuple[Floats, Floats]


def condensed(rates_N: Floats) -> Weighted:
    """Return (rates, weights) with sum_i P(a, l_i) = weights @ P(a, rates) for any a, to 1e-9, from the positive rates.

    As a function of l, P(a, l) bends over e-folds below 1 and over sqrt(l) above, so that where many rates lie within
    0.4 of each other in ln l + 2 sqrt l, ten Chebyshev points stand for them.
    """
    sorted_N = np.sort(rates_N[rates_N > 0])
    if sorted_N.size <= _FEW:
        return sorted_N, np.ones(sorted_N.size)
    bins_N = np.floor((np.log(sorted_N) + 2 * np.sqrt(sorted_N)) / _WIDTH)
    edges = [0, *(np.flatnonzero(np.diff(bins_N)) + 1), sorted_N.size]
    parts = [_points(sorted_N[low:high]) for low, high in pairwise(edges)]
    return np.concatenate([rates for rates, _ in parts]), np.concatenate([weights for _, weights in parts])


def _points(rates_K: Floats) -> Weighted:
    centre, radius = (rates_K[-1] + rates_K[0]) / 2, (rates_K[-1] - rates_K[0]) / 2
    if rates_K.size <= 2 * _POINTS or radius == 0:
        return rates_K, np.ones(rates_K.size)
    degrees_D1, angles_G = np.arange(_POINTS)[:, None], np.pi * (np.arange(_POINTS) + 0.5) / _POINTS
    angles_K = np.arccos(np.clip((rates_K - centre) / radius, -1, 1))
    moments_D = np.cos(degrees_D1 * angles_K).sum(axis=1) * np.where(degrees_D1[:, 0] == 0, 1, 2) / _POINTS
    return centre + radius * np.cos(angles_G), moments_D @ np.cos(degrees_D1 * angles_G)


def literal_threshold(weighted: Weighted, cache_slots: int, known: Known | None = None) -> float:
    """Find log(tau* + 1) of Eq. 3 with Pr[Poisson(l) > tau] = P(tau + 1, l); 1 <= M < number of positive rates.

    `weighted`: the `condensed` rates. `known`: ((threshold, slots) with more slots, the same with fewer).
    Without it the root is sought from 1e-12, where any positive double is present but for a share below
    1e-9, to beyond all rates.
    """
    rates_G, weights_G = weighted
    sums: dict[float, float] = dict(known or ())

    def surplus(log_shape: float) -> float:
        if log_shape not in sums:
            sums[log_shape] = float(weights_G @ gammainc(math.exp(log_shape), rates_G))
        return sums[log_shape] - cache_slots

    if known is not None:
        low, high = known[0][0], known[1][0]
    else:
        low, high = math.log(1e-12), math.log(float(rates_G.max()) + 2.0)
    while surplus(high) > 0:
        high += 0.5
    while surplus(low) < 0:
        low -= 0.5
    return float(brentq(surplus, low, high, xtol=1e-14, rtol=8.9e-16))


def literal_presence(rates_N: Floats, log_shape: float) -> Floats:
    """Compute q of Eq. 2 at the threshold that `literal_threshold` returns."""
    return np.asarray(gammainc(math.exp(log_shape), rates_N), dtype=np.float64)


def literal_missed(p_N: Floats, q_N: Floats, whole: PoissonBinomial, cache_slots: int) -> float:
    """Compute the misses, 1 - Eq. 4: sum_i p_i (1 - q_i) P(K_i >= M)."""
    first, others_RK = leave_one_out(whole, q_N, (p_N * (1 - q_N))[None])
    return float(others_RK[0, max(cache_slots - first, 0) :].sum())


def literal(p_N: Floats, global_batch: float, cache_slots: int) -> float:
    """Compute IAR(M) by Eq. 2-4."""
    rates_N = global_batch * p_N
    called = int(np.count_nonzero(rates_N))
    if cache_slots in (0, p_N.size) or cache_slots >= called:
        return admitted(0.0, cache_slots, called)
    q_N = literal_presence(rates_N, literal_threshold(condensed(rates_N), cache_slots))
    return admitted(literal_missed(p_N, q_N, poisson_binomial(q_N), cache_slots), cache_slots, called)
