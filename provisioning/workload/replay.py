"""A trace's load and mix of adapters over time, and what of a trace is replayed.

Legend: A adapters that are called often, N adapters, W windows.

The load is output tokens that are asked for per second. A plan is sized for the fullest window. Where that is no
fuller than chance makes one of equal load, the load counts as steady, and the whole trace is what is sized for.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from provisioning.arrays import Floats
from provisioning.inputs import InputError, positive
from provisioning.workload.requests import Requests

_WINDOWS = 48  # half an hour of a day, 75 s of an hour
_ENOUGH = 1000  # requests of a window: fewer say little of its load
_FEWEST_WINDOWS = 4
_CHANCE = 4.0  # standard deviations that the fullest of hundreds of windows does not reach by chance
_STEPS = 4  # windows begin at every quarter of one
_MOST_WHOLE = 500_000
_MOST_ADAPTERS, _MOST_WINDOWS = 20_000, 48  # of a mix
_OFTEN = 5  # calls of an adapter in a window, on average
_BEYOND_CHANCE = 1.5  # chi-square over its degrees of freedom


@dataclass(frozen=True, eq=False, kw_only=True)
class LoadOverTime:
    """`load_W` is that of windows back to back, over the mean; `fullest` that of the window at `start_s`, anywhere."""

    window_s: float
    start_s: float
    fullest: float
    load_W: Floats
    steady: bool = False

    @property
    def peak(self) -> float:
        """Factor on the mean load in a plan."""
        return 1.0 if self.steady else self.fullest


def over_time(requests: Requests, window_s: float | None = None) -> LoadOverTime:
    """Measure load in windows of --window, or of 1/48 of the trace; longer for 1,000 requests, at most a quarter.

    With a window that is given, no load is steady unless the window is as long as the trace.
    """
    span_s = requests.span_s
    if window_s is None:
        width_s = min(max(span_s / _WINDOWS, _ENOUGH / requests.mean_rate()), span_s / _FEWEST_WINDOWS)
    else:
        width_s = min(positive(window_s, "--window"), span_s)
    tokens = np.append(0.0, np.cumsum(requests.output_tokens, dtype=float))
    mean = tokens[-1] / span_s

    def load(starts_s: NDArray[np.floating[Any]]) -> Floats:
        edges = np.searchsorted(requests.arrival_s - requests.arrival_s[0], (starts_s, starts_s + width_s))
        return np.asarray((tokens[edges[1]] - tokens[edges[0]]) / width_s / mean)

    if span_s / width_s > _MOST_WHOLE:
        raise InputError(f"--window: got {window_s:g}, too short for a trace of {span_s:g} s; give a longer one")
    starts_s = np.append(np.arange(0, span_s - width_s, width_s / _STEPS), max(span_s - width_s, 0.0))
    loads = load(starts_s)
    fullest = int(np.argmax(loads))
    expected = len(requests) * width_s / span_s
    cv = float(requests.output_tokens.std()) / max(float(requests.output_tokens.mean()), 1e-9)
    chance = 1 + _CHANCE * float(np.sqrt((1 + cv**2) / max(expected, 1.0)))
    return LoadOverTime(
        window_s=width_s,
        start_s=float(starts_s[fullest]),
        fullest=max(float(loads[fullest]), 1.0),
        load_W=load(np.arange(max(int(span_s / width_s), 1)) * width_s),
        steady=width_s >= span_s or (window_s is None and float(loads[fullest]) < chance),
    )


def marked(requests: Requests, found: LoadOverTime) -> Requests:
    """Mark the calls `at_peak`, if there is a peak."""
    if found.steady:
        return replace(requests, at_peak=None)
    since_s = requests.arrival_s - requests.arrival_s[0] - found.start_s
    return replace(requests, at_peak=(since_s >= 0) & (since_s < found.window_s))


@dataclass(frozen=True, eq=False)
class WindowMix:
    """A window's share of all calls, load over the fullest window's, and its adapters' shares of calls and tokens."""

    share: float
    load: float
    popularity: Floats
    in_flight: Floats


def mixes(trace: Requests, found: LoadOverTime) -> tuple[WindowMix, ...]:
    """Return the mix of adapters of each window, back to back; none where they differ by no more than chance, or where
    windows are too short to tell."""
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


def about_peak(trace: Requests, most: int, seed: int) -> Requests:
    """Return at most so many calls of a trace, about its peak if it has one; at most 500,000 for seed 0."""
    most = most if seed else _MOST_WHOLE
    if len(trace) <= most:
        return trace
    start = _start(trace, most, np.random.default_rng(seed))
    return trace.part(slice(start, start + most))


def _start(trace: Requests, most: int, rng: np.random.Generator) -> int:
    """Choose a start: anywhere, or, with a peak, a quarter of the calls (or more, to reach its end) before it."""
    low, high = 0, len(trace) - most
    if trace.at_peak is not None:
        inside = np.flatnonzero(trace.at_peak)
        high = min(max(int(inside[0]) - most // 4, 0), high)
        low = min(max(int(inside[-1]) + 1 - most, 0), high)
    return int(rng.integers(low, high + 1))
