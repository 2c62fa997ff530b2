"""`literal`: Eq. 2-4 of the paper on the continuous extension of Eq. 2, on validated input.

Legend: N adapters, K window of counts. p are probabilities, rates = LB * p, M = cache_slots.
"""

from __future__ import annotations

import math

import numpy as np
from scipy.optimize import brentq
from scipy.special import gammainc

from provisioning.iar_models import admitted
from provisioning.poisson_binomial import Floats, PoissonBinomial, leave_one_out, poisson_binomial

_SLACK = 1e-7  # of a slot, in Eq. 3: an evaluation is dear where there are many adapters
Known = tuple[tuple[float, int], tuple[float, int]]


def literal_threshold(rates_N: Floats, cache_slots: int, known: Known | None = None) -> float:
    """log(tau* + 1) of Eq. 3 with Pr[Poisson(l) > tau] = P(tau + 1, l); 1 <= M < number of positive rates.

    `known`: ((threshold, slots) with more slots, the same with fewer). Without it the root is sought
    from 1e-12, where any positive double is present but for a share below 1e-9, to beyond all rates.
    """
    positive_N = rates_N[rates_N > 0]
    sums, slack = dict(known or ()), 0.0 if rates_N.size <= 4096 else _SLACK

    def surplus(log_shape: float) -> float:
        if log_shape in sums:
            return sums[log_shape] - cache_slots
        left = float(gammainc(math.exp(log_shape), positive_N).sum()) - cache_slots
        return 0.0 if abs(left) < slack else left

    if known is not None:
        low, high = known[0][0], known[1][0]
    else:
        low, high = math.log(1e-12), math.log(float(positive_N.max()) + 2.0)
    while surplus(high) > 0:
        high += 0.5
    while surplus(low) < 0:
        low -= 0.5
    return float(brentq(surplus, low, high, xtol=1e-14, rtol=8.9e-16))


def literal_presence(rates_N: Floats, log_shape: float) -> Floats:
    """q of Eq. 2 at the threshold that `literal_threshold` gives."""
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
