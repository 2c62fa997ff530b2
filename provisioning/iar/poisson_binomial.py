"""The number of present adapters: the sum of independent Bernoulli(q_i), with and without adapter i.

Legend: N adapters, G points (distinct q, or Chebyshev's), R rows of weights, K window.

A distribution is kept on a window outside of which Bernstein's inequality leaves less than 1e-18 of
the mass. Products are taken pairwise up a tree, by FFT once they are long, and all at once where they
near the window's length: O(N log^2 N), absolute error of a probability below 1e-13 at N = 100,000.

Leaving adapter i out is a division by (1 - q_i) + q_i z, that is, a recursion over the window: run
upwards for q <= 1/2 and downwards above, where it is stable. What is summed over all adapters is
linear in their leave-one-out distributions, and these are smooth in q alone; so above 1,024
adapters, 64 Chebyshev points on either side of 1/2 stand for all of them (error below
1e-10 in the tests).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy.fft import next_fast_len

from provisioning.arrays import Floats

_LOG_TAIL = math.log(2e18)
MAX_DIRECT_POINTS = 1024
_CHEBYSHEV_POINTS = 64
_STRIDE = 8  # its square root
_BLOCK = 8192
_DIRECT_LENGTH = 32


@dataclass(frozen=True)
class PoissonBinomial:
    """P(K = first + j) = pmf[j]; everything outside the window is below 1e-18 in all."""

    first: int
    pmf: Floats

    def excess(self, cache_slots: int) -> float:
        """Compute E[(K - M)+]: the expected number of present adapters without a slot."""
        counts = self.first + np.arange(self.pmf.size)
        return float(np.maximum(counts - cache_slots, 0) @ self.pmf)


def poisson_binomial(q_N: Floats) -> PoissonBinomial:
    """Compute the distribution of the sum of independent Bernoulli(q_N[i])."""
    certain = int(np.count_nonzero(q_N >= 1.0))
    uncertain_N = q_N[(q_N > 0.0) & (q_N < 1.0)]
    mean, variance = float(uncertain_N.sum()), float((uncertain_N * (1 - uncertain_N)).sum())
    reach = _LOG_TAIL / 3 + math.sqrt(_LOG_TAIL**2 / 9 + 2 * variance * _LOG_TAIL)
    first = max(0, math.floor(mean - reach))
    last = min(uncertain_N.size, math.ceil(mean + reach))
    pmf = _product_tree(uncertain_N, first, last - first + 1)
    return PoissonBinomial(first + certain, np.maximum(pmf, 0.0))


def _product_tree(q_N: Floats, first: int, length: int) -> Floats:
    """Compute the window [first, first + length) of the product of all (1 - q) + q z."""
    rows = 1 << max(q_N.size - 1, 0).bit_length()
    level = np.zeros((rows, 2))
    level[:, 0] = 1.0
    level[: q_N.size, 0] -= q_N
    level[: q_N.size, 1] = q_N
    while level.shape[0] > 1 and level.shape[1] <= max(length // 4, _DIRECT_LENGTH):
        level = _convolve(level[0::2], level[1::2])
    if level.shape[0] == 1:
        return np.asarray(level[0, first : first + length])
    # What a cyclic product folds into the window comes from outside of it, where there is nothing to speak of.
    size = next_fast_len(max(length, level.shape[1]), real=True)
    product = np.fft.irfft(np.prod(np.fft.rfft(level, size, axis=1), axis=0), size)
    return np.asarray(product[np.arange(first, first + length) % size])


def _convolve(left: Floats, right: Floats) -> Floats:
    rows, length = left.shape
    if length <= _DIRECT_LENGTH:
        out = np.zeros((rows, 2 * length - 1))
        for shift in range(length):
            out[:, shift : shift + length] += left[:, shift : shift + 1] * right
        return out
    size = 9 * (length - 1) // 4  # length - 1 is a power of two: 2^a 3^2 >= 2 length - 1
    product = np.fft.rfft(left, size, axis=1) * np.fft.rfft(right, size, axis=1)
    result: Floats = np.fft.irfft(product, size, axis=1)[:, : 2 * length - 1]
    return result


def leave_one_out(
    whole: PoissonBinomial, q_N: Floats, weights_RN: Floats, max_direct_points: int = MAX_DIRECT_POINTS
) -> tuple[int, Floats]:
    """Sum over i of weights[r, i] * P(K_i = k), K_i being the whole without adapter i.

    Returns (first, out_RK) with out_RK[r, j] at k = first + j; `first` may be -1 (where it is 0).
    """
    out_RK = np.zeros((weights_RN.shape[0], whole.pmf.size + 1))
    low_N = q_N <= 0.5
    for half, upwards in ((low_N, True), (~low_N, False)):
        if half.any():
            points_G, weights_RG = _points(q_N[half], weights_RN[:, half], max_direct_points)
            _divide(whole.pmf, points_G, weights_RG, out_RK, upwards=upwards)
    return whole.first - 1, out_RK


def _divide(pmf_K: Floats, q_G: Floats, weights_RG: Floats, out_RK: Floats, *, upwards: bool) -> None:
    """Add weights @ o to `out`, where o solves d = o * (1 - q, q) from its stable end."""
    pivot_G, other_G = (1 - q_G, q_G) if upwards else (q_G, 1 - q_G)
    ratio_G, inverse_G = other_G / pivot_G, 1 / pivot_G
    others_KG = np.empty((pmf_K.size, q_G.size))
    o_G = np.zeros_like(q_G)
    for j in range(pmf_K.size) if upwards else range(pmf_K.size - 1, -1, -1):
        o_G = pmf_K[j] * inverse_G - ratio_G * o_G
        others_KG[j] = o_G
    added_RK = weights_RG @ others_KG.T
    if upwards:
        out_RK[:, 1:] += added_RK
    else:
        out_RK[:, :-1] += added_RK


def _points(q_N: Floats, weights_RN: Floats, max_direct_points: int) -> tuple[Floats, Floats]:
    """Return a few points and weights that integrate any smooth function of q as all adapters would."""
    lowest, highest = float(q_N.min()), float(q_N.max())
    if q_N.size <= max_direct_points or lowest == highest:
        distinct_G, index_N = np.unique(q_N, return_inverse=True)
        sums = [np.bincount(index_N, row_N, distinct_G.size) for row_N in weights_RN]
        return distinct_G, np.array(sums)
    centre, radius = (highest + lowest) / 2, (highest - lowest) / 2
    x_G = np.cos(np.pi * (np.arange(_CHEBYSHEV_POINTS) + 0.5) / _CHEBYSHEV_POINTS)
    moments_RD = _chebyshev_moments((q_N - centre) / radius, weights_RN)
    moments_RD[:, 1:] *= 2
    degrees_DG = np.cos(np.arange(_CHEBYSHEV_POINTS)[:, None] * np.arccos(x_G))
    return centre + radius * x_G, moments_RD @ degrees_DG / _CHEBYSHEV_POINTS


def _chebyshev_moments(x_N: Floats, weights_RN: Floats) -> Floats:
    """Compute sum_i weights[r, i] T_d(x_i) for d < 64, from the products T_8a T_b = (T_8a+b + T_8a-b) / 2, in blocks
    that stay in a core's cache."""
    products_RAB = np.zeros((weights_RN.shape[0], _STRIDE, _STRIDE))
    for start in range(0, x_N.size, _BLOCK):
        block = slice(start, start + _BLOCK)
        low_BK = _chebyshev(x_N[block], _STRIDE + 1)
        high_AK = _chebyshev(low_BK[_STRIDE], _STRIDE)
        for row, weights_N in enumerate(weights_RN):
            products_RAB[row] += high_AK @ (low_BK[:_STRIDE] * weights_N[block]).T
    moments_RD = np.empty((weights_RN.shape[0], _CHEBYSHEV_POINTS))
    moments_RD[:, :_STRIDE] = products_RAB[:, 0]
    for a in range(1, _STRIDE):
        here = _STRIDE * a
        moments_RD[:, here] = products_RAB[:, a, 0]
        below_RB = moments_RD[:, here - 1 : here - _STRIDE : -1]
        moments_RD[:, here + 1 : here + _STRIDE] = 2 * products_RAB[:, a, 1:] - below_RB
    return moments_RD


def _chebyshev(x_K: Floats, num: int) -> Floats:
    """Compute T_0 ... T_{num - 1} at all x."""
    rows = np.empty((num, x_K.size))
    rows[0], rows[1] = 1.0, x_K
    for degree in range(2, num):
        rows[degree] = 2 * x_K * rows[degree - 1] - rows[degree - 2]
    return rows
