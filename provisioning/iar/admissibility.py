"""Immediate Admissibility Rate: the share of requests that find their adapter cached, or can have it cached at once.

Paper section 4.2.1. Three models of which adapters are present (N, p, LB, M as in its Table 2):

    literal   Eq. 2-4: a threshold tau* with sum q_i = M, and every present adapter counts as a hit
    offered   present while a request is in flight, q_i = 1 - exp(-lambda_i), and the M slots are
              shared when more than M are present:
              IAR(M) = sum_i p_i [q_i E[min(1, M/(K_i+1))] + (1-q_i) P(K_i <= M-1)]
    queued    the same working set with its queue: waiting requests stay present, most of them cold

K_i is the Poisson-binomial count of the others. `docs/provisioning.md` shows where each holds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal, get_args

import numpy as np
from scipy.special import ndtri

from provisioning.arrays import Floats
from provisioning.iar import literal, models, queued
from provisioning.iar.search import literal_min
from provisioning.inputs import InputError, count, normalised, positive, share

Model = Literal["offered", "literal", "queued"]
_MODELS = {"literal": literal.literal, "queued": queued.queued}
_FAR = 8.0  # standard deviations


def immediate_admissibility(
    popularity: Iterable[float] | Floats, global_batch: float, cache_slots: int, model: Model = "offered"
) -> float:
    """Compute IAR(M) in [0, 1]: 0 at M = 0, and exactly 1 if and only if all adapters that are ever called fit.

    `popularity`: any non-negative weights, normalised here. Raises InputError (a ValueError) for
    NaN, negative, empty or all-zero weights, global_batch <= 0, or cache_slots outside [0, N].
    Absolute error below 1e-9 (1e-12 up to 1,024 adapters).
    """
    p_N, load = normalised(popularity), positive(global_batch, "global_batch")
    slots = count(cache_slots, "cache_slots", 0, p_N.size)
    if _check(model) == "offered":
        return float(models.offered_curve(p_N, load)[slots])
    return _MODELS[model](p_N, load, slots)


def admissibility_curve(popularity: Iterable[float] | Floats, global_batch: float) -> Floats:
    """Compute `offered` for every M = 0..N at the cost of one; non-decreasing."""
    return models.offered_curve(normalised(popularity), positive(global_batch, "global_batch"))


def min_cache_slots(
    popularity: Iterable[float] | Floats, global_batch: float, target: float, model: Model = "offered"
) -> int:
    """Find the smallest M >= 1 with IAR(M) >= target, Eq. 1; it always exists, as IAR(N) = 1.

    `offered` and `queued` rise with M and are searched; `literal` does not always rise, so that
    ranges of M are left out only where a bound proves that none of them reaches the target.
    """
    p_N, load = normalised(popularity), positive(global_batch, "global_batch")
    wanted = share(target, "target")
    if _check(model) == "literal":
        return literal_min(p_N, load, wanted)
    first = max(int(np.argmax(models.offered_curve(p_N, load) >= wanted)), 1)
    if model == "offered":
        return first
    return _first_queued(p_N, load, wanted, first)


def _first_queued(p_N: Floats, load: float, wanted: float, start: int) -> int:
    """Search by false position (Illinois) on the normal quantile of the misses, which is nearly straight in M."""
    queue, aim = queued.CacheQueue(p_N, load), float(ndtri(1 - wanted))
    low, high = 0, max(queue.called, 1)
    if wanted == 1:
        return high
    above, below = _FAR, -_FAR  # how far the quantiles at low and high are from the aim
    middle, last = min(start, math.ceil(queued.first_come_slots(queue.p_N, 1 - wanted))), 0
    while high - low > 1:
        middle = min(max(middle, low + 1), high - 1)
        iar = queue.iar(middle)
        left = float(np.clip(ndtri(1 - iar) - aim, -_FAR, _FAR))
        side = -1 if iar >= wanted else 1
        if side > 0:
            low, above, below = middle, left, below / 2 if last == side else below
        else:
            high, below, above = middle, left, above / 2 if last == side else above
        if last == 0:  # a first step by the slope that a normal count would have
            middle += round(left * queue.spread) + side
        else:
            middle = low + round((high - low) * above / (above - below))
        last = side
    return high


def _check(model: str) -> str:
    if model not in get_args(Model):
        raise InputError(f"model: got {model!r}, expected one of {', '.join(get_args(Model))}")
    return model
