"""Other days of a trace: its calls drawn anew, in blocks, with the load that a fitted process gives them.

Legend: W windows of the trace.

The load of a window is a daily curve times a factor. The curve has two harmonics of a day (of the trace, where it is
shorter than two days), and is flat where they explain less than 70 % of what varies. A day is made of blocks of
consecutive windows, drawn with their calls from where the curve is about as high, for each group of adapters that move
together (`together`) by themselves: which adapters are called together, and how calls cluster within a block, stays as
it was, and tenants are busy together or not by chance. The load of all in a block, and in a window of it, is drawn by a
smoothed bootstrap (its kernel is log-normal), so that peaks are higher or lower than any that was seen: calls are left
out, or others of the block are added. It has one factor for all groups: factors of their own would let a peak be that
of a few tenants, whose adapters need fewer slots. The load of the day is as uncertain as the trace's own mean.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from provisioning.arrays import Floats, Ints
from provisioning.workload.requests import Requests
from provisioning.workload.together import groups

_WINDOWS, _BLOCKS = 96, 16  # of a day
_FEWEST = 20  # calls of a window, on average, and of a day
_DAY_S = 86_400.0
_EXPLAINED, _FEWEST_FOR_CURVE = 0.7, 12  # windows
_ALIKE = 1.5  # factor between the curve where a block is drawn from and where it is put


@dataclass(frozen=True, eq=False, kw_only=True)
class DayProcess:
    """Fitted process: blocks of each group of adapters under one curve, and the spread of the load of all about it."""

    trace: Requests
    groups: tuple[BlockDraws, ...]
    spreads: tuple[float, float, float]

    @classmethod
    def of(cls, trace: Requests) -> DayProcess:
        """Fit the process to a trace."""
        days = int(trace.span_s // _DAY_S)
        days, day_s = (days, _DAY_S) if days >= 2 else (1, trace.span_s)
        per_day = max(min(_WINDOWS, len(trace) // (days * _FEWEST)), 1)
        width_s, num = day_s / per_day, days * per_day
        since_s = trace.arrival_s - trace.arrival_s[0]
        edges_W1 = np.searchsorted(since_s, np.arange(num + 1) * width_s)
        edges_W1[-1] = len(trace) if days == 1 else edges_W1[-1]
        load_W = np.diff(np.append(0.0, np.cumsum(trace.output_tokens))[edges_W1])
        curve_W = _curve(load_W / load_W.mean(), per_day)
        group = groups(trace.adapter, edges_W1, curve_W, trace.num_adapters)[trace.adapter]
        kept = np.arange(edges_W1[-1])
        apart = [kept[group[kept] == one] for one in np.unique(group)]
        return cls(
            trace=trace,
            groups=tuple(BlockDraws.of(trace, calls, curve_W, width_s=width_s, per_day=per_day) for calls in apart),
            spreads=_spreads(load_W / curve_W, _block(per_day), trace.output_tokens),
        )

    def day(self, seed: int) -> Requests:
        """Draw a day; the same seed gives the same."""
        rng, per_day = np.random.default_rng(seed), self.groups[0].per_day
        of_day, of_block, of_window = self.spreads
        blocks = _factors(rng, of_block, -(-per_day // _block(per_day)))
        factor_W = _factors(rng, of_day, 1) * np.repeat(blocks, _block(per_day))[:per_day]
        factor_W *= _factors(rng, of_window, per_day)
        drawn = (one.day(rng, factor_W) for one in self.groups)
        calls, arrival_s = (np.concatenate(both) for both in zip(*drawn, strict=True))
        if calls.size < _FEWEST:  # blocks of a short trace may be empty
            return replace(self.trace, at_peak=None)
        order = np.argsort(arrival_s, kind="stable")
        return replace(self.trace.part(calls[order]), arrival_s=arrival_s[order], at_peak=None)


@dataclass(frozen=True, eq=False, kw_only=True)
class BlockDraws:
    """Calls that are drawn together. `calls` index the trace, `edges_W1` the first of each window, and the end.

    `since_s` is the time of each call in its window.
    """

    calls: Ints
    since_s: Floats
    edges_W1: Ints
    curve_W: Floats
    width_s: float
    per_day: int

    @classmethod
    def of(cls, trace: Requests, calls: Ints, curve_W: Floats, *, width_s: float, per_day: int) -> BlockDraws:
        """Fit the draws of these calls under a curve."""
        at_s = trace.arrival_s[calls] - trace.arrival_s[0]
        window = np.minimum((at_s / width_s).astype(np.int64), curve_W.size - 1)
        return cls(
            calls=calls,
            since_s=at_s - window * width_s,
            edges_W1=np.searchsorted(window, np.arange(curve_W.size + 1)),
            curve_W=curve_W,
            width_s=width_s,
            per_day=per_day,
        )

    def day(self, rng: np.random.Generator, factor_W: Floats) -> tuple[Ints, Floats]:
        """Draw a day: calls of the trace, `factor_W` as many in its windows, and when they arrive."""
        drawn, arrivals_s, block = list[Ints](), list[Floats](), _block(self.per_day)
        for first in range(0, self.per_day, block):
            source = self._source(rng, first)
            for at in range(min(block, self.per_day - first)):
                times = factor_W[first + at] * self.curve_W[first + at] / self.curve_W[source + at]
                which, since_s = self._window(rng, source, source + at, times)
                drawn.append(self.calls[which])
                arrivals_s.append(since_s + (first + at) * self.width_s)
        return np.concatenate(drawn), np.concatenate(arrivals_s)

    def _source(self, rng: np.random.Generator, first: int) -> int:
        """Draw the first window of a block that may stand at `first`."""
        block = _block(self.per_day)
        middle, starts = block // 2, np.arange(self.curve_W.size - block + 1)
        here = self.curve_W[min(first + middle, self.per_day - 1)]
        far = np.abs(np.log(self.curve_W[starts + middle] / here))
        return int(rng.choice(starts[far <= max(np.log(_ALIKE), float(far.min()))]))

    def _window(self, rng: np.random.Generator, first: int, window: int, times: float) -> tuple[Ints, Floats]:
        """Return the calls of a window, `times` as many, and when they arrive in it; others come from its block."""
        own = np.arange(self.edges_W1[window], self.edges_W1[window + 1])
        since_s = self.since_s[own]
        if times < 1 or not own.size:
            kept = rng.random(own.size) < times
            return own[kept], since_s[kept]
        more = int(rng.poisson((times - 1) * own.size))
        others = rng.integers(self.edges_W1[first], self.edges_W1[first + _block(self.per_day)], more)
        return np.concatenate([own, others]), np.concatenate([since_s, rng.choice(since_s, more)])


def _curve(load_W: Floats, per_day: int) -> Floats:
    """Fit two harmonics of a day; flat where they explain too little, or a day has too few windows to tell."""
    flat = np.ones(load_W.size)
    if per_day < _FEWEST_FOR_CURVE:
        return flat
    angle_W = 2 * np.pi * np.arange(load_W.size) / per_day
    terms = np.stack([flat, *(wave(times * angle_W) for times in (1, 2) for wave in (np.sin, np.cos))])
    weights, *_ = np.linalg.lstsq(terms.T, load_W, rcond=None)
    curve_W = np.maximum(weights @ terms, 0.05)
    varies = float(load_W.var())
    if not varies or float(((load_W - curve_W) ** 2).mean()) > (1 - _EXPLAINED) * varies:
        return flat
    return np.asarray(curve_W / curve_W.mean())


def _block(per_day: int) -> int:
    return max(round(per_day / _BLOCKS), 1)


def _factors(rng: np.random.Generator, spread: float, num: int) -> Floats:
    return np.exp(spread * rng.normal(size=num) - spread**2 / 2)


def _spreads(factor_W: Floats, block: int, tokens: Ints) -> tuple[float, float, float]:
    """Compute the spread of the mean, and kernels by Silverman's rule: of blocks beyond chance, of windows in them."""
    blocks = factor_W.size // block
    kept_BW = factor_W[: blocks * block].reshape(blocks, block)
    if blocks < 2 or not kept_BW.any():
        return 0.0, 0.0, 0.0
    factor_B = kept_BW.mean(axis=1) / kept_BW.mean()
    chance = (1 + (tokens.std() / tokens.mean()) ** 2) * blocks / tokens.size
    varies = float(factor_B.var(ddof=1))
    of_block = np.sqrt(np.log1p(max(varies - chance, 0.0))) * (4 / 3 / blocks) ** 0.2
    within = float((kept_BW / kept_BW.mean() - factor_B[:, None]).var()) * block / max(block - 1, 1)
    of_window = np.sqrt(np.log1p(within)) * (4 / 3 / kept_BW.size) ** 0.2
    return float(np.sqrt(varies / blocks)), float(of_block), float(of_window)
