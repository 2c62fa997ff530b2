"""Adapters whose load moves together: tenants, say, that are busy at hours of their own.

Legend: A adapters that are called often, W windows.

Two adapters move together where what their calls have beyond their share of each window's load is correlated, over
windows. Clusters of these (average linkage) are groups. Then each adapter, however rare, goes to the group, or to the
load of all, with the windows that make its calls the likeliest. They count as tenants only if they are independent, so
that the load of all varies as the sum of theirs would: where it varies less, they take turns (one popular set after
another), and where it varies more, all rise together. Then all are one group.
"""

from __future__ import annotations

import numpy as np

from provisioning.arrays import Floats, Ints

_OFTEN, _MOST, _MOST_GROUPS = 40, 1000, 64  # calls that can be told from chance; adapters, the hottest; clusters
_FEWEST_WINDOWS, _FEWEST_MEMBERS = 12, 4  # of some hundred adapters, two or three are alike by chance
_PRIOR = 1.0  # calls of a window, beside a group's own
_LIKENESS = 3.0  # standard deviations of the correlation of two that have nothing in common
_INDEPENDENT = (0.5, 2.0)  # variance of the load of all, over the sum of the groups'


def groups(adapter: Ints, edges_W1: Ints, curve_W: Floats, num_adapters: int) -> Ints:
    """Return the group of each adapter, 0 for one of its own; all 0 where groups are not independent."""
    found, calls = np.zeros(num_adapters, dtype=np.int64), np.bincount(adapter, minlength=num_adapters)
    often = np.argsort(-calls, kind="stable")[:_MOST]
    often = often[calls[often] >= _OFTEN]
    if often.size < 2 or curve_W.size < _FEWEST_WINDOWS:
        return found
    all_W = np.diff(edges_W1).astype(float)
    place = np.full(num_adapters, often.size)
    place[often] = np.arange(often.size)
    flat = place[adapter[: edges_W1[-1]]] * curve_W.size + np.repeat(np.arange(curve_W.size), np.diff(edges_W1))
    counts_AW = np.bincount(flat, minlength=(often.size + 1) * curve_W.size).reshape(-1, curve_W.size)[:-1]
    cluster = _clusters(counts_AW.astype(float), all_W)
    of_group = np.stack([counts_AW[cluster == one].sum(axis=0) for one in range(int(cluster.max()) + 1)]).astype(float)
    of_group[0] = all_W
    window = np.repeat(np.arange(curve_W.size), np.diff(edges_W1))
    found = _likeliest(adapter[: edges_W1[-1]], window, of_group, num_adapters)
    of_group = np.zeros_like(of_group)
    np.add.at(of_group, (found[adapter[: edges_W1[-1]]], window), 1.0)
    return found if _independent(of_group, curve_W) else np.zeros_like(found)


def _likeliest(adapter: Ints, window: Ints, of_group: Floats, num_adapters: int) -> Ints:
    """Return each adapter's likeliest group, by its calls and the load of the groups over time; 0 is that of all."""
    share_W = of_group[0] / of_group[0].sum()
    best, likelihood = np.zeros(num_adapters, dtype=np.int64), np.full(num_adapters, -np.inf)
    for group, load_W in enumerate(of_group):
        smoothed_W = load_W + _PRIOR * share_W * share_W.size
        logs_W = np.log(np.maximum(smoothed_W / smoothed_W.sum(), 1e-12))
        of_this = np.bincount(adapter, logs_W[window], num_adapters)
        better = of_this > likelihood
        best[better], likelihood[better] = group, of_this[better]
    return best


def _clusters(counts_AW: Floats, all_W: Floats) -> Ints:
    from scipy.cluster.hierarchy import fcluster, linkage

    expected = counts_AW.sum(axis=1, keepdims=True) * all_W / all_W.sum()
    beyond = (counts_AW - expected) / np.sqrt(np.maximum(expected, 1e-9))
    likeness = np.nan_to_num(np.corrcoef(beyond))
    apart = 1 - likeness[np.triu_indices_from(likeness, 1)]
    cluster = fcluster(linkage(apart, "average"), 1 - _LIKENESS / np.sqrt(all_W.size), "distance")
    sizes = np.bincount(cluster)
    kept = np.argsort(-sizes, kind="stable")[:_MOST_GROUPS]
    names = np.zeros(sizes.size, dtype=np.int64)
    names[kept] = np.where(sizes[kept] >= _FEWEST_MEMBERS, np.arange(1, kept.size + 1), 0)
    return names[cluster]


def _independent(of_group: Floats, curve_W: Floats) -> bool:
    """Compare what varies of the load of all, beside the curve, with the sum over groups."""
    beyond = of_group - of_group.sum(axis=1, keepdims=True) * curve_W / curve_W.sum()
    low, high = _INDEPENDENT
    return len(of_group) > 1 and bool(low < beyond.sum(axis=0).var() / beyond.var(axis=1).sum() < high)
