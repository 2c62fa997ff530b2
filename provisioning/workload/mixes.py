"""The mix of adapters of each window of a trace, where it changes over time by more than chance.

Legend: A adapters that are called often, N adapters, W windows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from provisioning.arrays import Floats
from provisioning.workload.replay import LoadOverTime
from provisioning.workload.requests import Requests

_MOST_ADAPTERS, _MOST_WINDOWS = 20_000, 48
_OFTEN = 5  # calls of an adapter in a window, on average
_BEYOND_CHANCE = 1.5  # chi-square over its degrees of freedom


@dataclass(frozen=True, eq=False)
class WindowMix:
    """A window's share of all calls, load over the fullest window's, and its adapters' shares of calls and tokens."""

    share: float
    load: float
    popularity: Floats
    in_flight: Floats


def mixes(trace: Requests, found: LoadOverTime) -> tuple[WindowMix, ...]:
    """Return the mixes, back to back; none where they are alike, or where windows are too short to tell."""
    num = min(max(int(trace.span_s / found.window_s), 1), _MOST_WINDOWS)
    if not trace.names or trace.num_adapters > _MOST_ADAPTERS or num < 2:
        return ()
    since_s = trace.arrival_s - trace.arrival_s[0]
    window = np.minimum((since_s / trace.span_s * num).astype(np.int64), num - 1)
    flat, size = window * trace.num_adapters + trace.adapter, num * trace.num_adapters
    calls_WN = np.bincount(flat, minlength=size).reshape(num, -1).astype(float)
    if not calls_WN.sum(axis=1).all() or not _move(calls_WN):
        return ()
    tokens_WN = np.bincount(flat, trace.output_tokens, size).reshape(num, -1)
    load_W = tokens_WN.sum(axis=1)
    return tuple(
        WindowMix(float(calls.sum() / len(trace)), float(load), calls / calls.sum(), tokens / tokens.sum())
        for calls, tokens, load in zip(calls_WN, tokens_WN, load_W / load_W.max(), strict=True)
    )


def _move(calls_WN: Floats) -> bool:
    often = calls_WN.sum(axis=0) >= _OFTEN * len(calls_WN)
    if np.count_nonzero(often) < 2:
        return False
    calls_WA = calls_WN[:, often]
    expected = np.outer(calls_WA.sum(axis=1), calls_WA.sum(axis=0)) / calls_WA.sum()
    chi_square = float(((calls_WA - expected) ** 2 / np.maximum(expected, 1e-9)).sum())
    freedom = (len(calls_WA) - 1) * (int(np.count_nonzero(often)) - 1)
    return chi_square > _BEYOND_CHANCE * freedom
