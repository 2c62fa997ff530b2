"""`offered`, and what all admissibility models share, on validated input. `iar` is the public face.

Legend: N adapters, K window of counts. p are probabilities, rates = LB * p, M = cache_slots.
All of them compute the rate of misses and return 1 minus it.
"""

from __future__ import annotations

import math

import numpy as np

from provisioning.arrays import Floats
from provisioning.iar.poisson_binomial import leave_one_out, poisson_binomial

_ALMOST_ONE = math.nextafter(1.0, 0.0)


def admitted(missed: float, cache_slots: int, called: int) -> float:
    """Return 1 - missed; exactly 1 if and only if every adapter that is ever called fits."""
    if cache_slots == 0:
        return 0.0
    if cache_slots >= called:
        return 1.0
    return min(max(1.0 - missed, 0.0), _ALMOST_ONE)


def offered_curve(p_N: Floats, global_batch: float, in_flight_N: Floats | None = None) -> Floats:
    """Compute `offered` for M = 0..N: present means that a request is in flight, q = 1 - exp(-lambda).

    `in_flight_N` are the adapters' shares of the requests in flight, where these are not p for all write alike. Slots
    are shared where the present adapters do not fit: miss(M) = S0[M - first] - M S1[M - first], tail sums over k >= M,
    from sum_i p_i [q_i E[max(0, 1 - M/(K_i+1))] + (1-q_i) P(K_i >= M)].
    """
    q_N = -np.expm1(-global_batch * (p_N if in_flight_N is None else in_flight_N))
    first, others_RK = leave_one_out(poisson_binomial(q_N), q_N, np.stack([p_N, p_N * q_N]))
    counts_K = first + np.arange(others_RK.shape[1])
    tail0, tail1 = _tail_sums(others_RK[0]), _tail_sums(others_RK[1] / np.maximum(counts_K + 1, 1))
    slots = np.arange(p_N.size + 1)
    index = np.clip(slots - first, 0, tail0.size - 1)
    missed = np.minimum.accumulate(tail0[index] - slots * tail1[index])
    curve = np.clip(1.0 - missed, 0.0, _ALMOST_ONE)
    curve[0] = 0.0
    curve[np.count_nonzero(p_N) :] = 1.0
    return curve


def _tail_sums(values_K: Floats) -> Floats:
    return np.append(np.cumsum(values_K[::-1])[::-1], 0.0)
