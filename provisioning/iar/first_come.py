"""A cache without eviction: the first M adapters called keep its slots.

After u calls adapter i is in with probability 1 - exp(-u p_i), and M are at the u where these sum to M.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from scipy.optimize import brentq

from provisioning.arrays import Floats


def misses(p_N: Floats, cache_slots: int) -> float:
    """Return the share of calls for adapters without a slot, for 0 < M < N."""

    def surplus(log_calls: float) -> float:
        return float(-np.expm1(-math.exp(log_calls) * p_N).sum()) - cache_slots

    return float(p_N @ np.exp(-math.exp(_root(surplus)) * p_N))


def slots(p_N: Floats, missed: float) -> float:
    """Return the M, a real number, at which `misses` is `missed`, a share between 0 and 1."""

    def surplus(log_calls: float) -> float:
        return missed - float(p_N @ np.exp(-math.exp(log_calls) * p_N))

    return float(-np.expm1(-math.exp(_root(surplus)) * p_N).sum())


def _root(rising: Callable[[float], float]) -> float:
    low, high = 0.0, 1.0
    while rising(high) < 0:
        low, high = high, high + 1.0
    while rising(low) > 0:
        low -= 1.0
    return float(brentq(rising, low, high, xtol=1e-12))
