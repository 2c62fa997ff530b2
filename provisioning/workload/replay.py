"""A trace's load over time, and what of a trace is replayed.

Legend: W windows.

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
