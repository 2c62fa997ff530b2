"""ServeGen's `chunk-N-trace.csv`: the rate and the burstiness of a client, window by window.

A line is: window start (s), requests/s, CV of the gaps, family (Gamma or Weibull), its two parameters (shape, scale
in s); a window without traffic has an empty family.
"""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from provisioning.arrays import Floats
from provisioning.inputs import InputError
from provisioning.workload.requests import renewal_gaps

_FAMILIES = ("Gamma", "Weibull")
_LARGEST_CV = 10.0  # a longer-tailed renewal process does not settle within a run; some windows claim 170
_WINDOW_S = 600.0


@dataclass(frozen=True)
class ArrivalWindow:
    """Traffic of one client from `start_s` on: mean rate, CV and law of the gaps between requests."""

    start_s: float
    rate: float
    cv: float
    family: str
    shape: float
    scale_s: float

    def gaps(self, rng: np.random.Generator, num: int) -> Floats:
        """Draw gaps in seconds with the window's mean rate, and a CV of at most 10."""
        if _law_cv(self.family, self.shape) > _LARGEST_CV:
            return renewal_gaps(rng, _LARGEST_CV, num) / self.rate
        drawn = rng.weibull(self.shape, num) if self.family == "Weibull" else rng.gamma(self.shape, 1.0, num)
        return np.asarray(drawn / _unit_mean(self.family, self.shape) / self.rate)


def _unit_mean(family: str, shape: float) -> float:
    from scipy.special import gamma

    return float(gamma(1 + 1 / shape)) if family == "Weibull" else shape


def _law_cv(family: str, shape: float) -> float:
    from scipy.special import gammaln

    if family == "Gamma":
        return 1 / math.sqrt(shape)
    return math.sqrt(max(math.expm1(min(float(gammaln(1 + 2 / shape) - 2 * gammaln(1 + 1 / shape)), 700.0)), 0.0))


def renewals(rng: np.random.Generator, window: ArrivalWindow, span_s: float) -> Floats:
    """Draw arrivals in [0, span) by the window's law."""
    times: list[Floats] = []
    now = -float(rng.random() * window.gaps(rng, 1)[0])
    while now < span_s:
        block = now + np.cumsum(window.gaps(rng, int(window.rate * span_s * 1.2) + 16))
        times.append(block)
        now = float(block[-1])
    arrivals = np.concatenate(times)
    return np.asarray(arrivals[(arrivals >= 0) & (arrivals < span_s)])


def width_s(series: tuple[ArrivalWindow, ...]) -> float:
    """Return the length of a client's windows."""
    return series[1].start_s - series[0].start_s if len(series) > 1 else _WINDOW_S


def read(file: Path) -> tuple[ArrivalWindow, ...]:
    """Read the windows of one client; raises InputError naming file and line."""
    windows = []
    try:
        rows = list(csv.reader(file.read_text(encoding="utf-8-sig").splitlines()))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"--trace: {file} cannot be read as CSV: {error}") from None
    for number, row in enumerate(rows, start=1):
        windows.append(_window(row, f"--trace: {file} line {number}"))
        if number > 1 and windows[-1].start_s <= windows[-2].start_s:
            raise InputError(
                f"--trace: {file} line {number}: starts at {windows[-1].start_s:g} s, not after the line before"
            )
    if not windows:
        raise InputError(f"--trace: {file} is empty")
    return tuple(windows)


def _window(row: list[str], where: str) -> ArrivalWindow:
    got = f"{where}: got {','.join(row)!r}"
    try:
        start, rate, cv, family, shape, scale = row
        window = ArrivalWindow(float(start), float(rate), float(cv), family.strip(), float(shape), float(scale))
    except ValueError:
        raise InputError(f"{got}, expected start,rate,cv,family,shape,scale with numbers but for the family") from None
    numbers = [window.start_s, window.rate, window.cv, window.shape, window.scale_s]
    if not np.isfinite(numbers).all() or min(numbers) < 0:
        raise InputError(f"{got}, expected finite numbers of 0 or more")
    if window.rate > 0 and not (window.family in _FAMILIES and min(window.shape, window.scale_s) > 0):
        raise InputError(f"{got}, expected Gamma or Weibull with shape and scale above 0 where there is traffic")
    if window.rate > 0 and not np.isfinite(_unit_mean(window.family, window.shape)):
        raise InputError(f"{got}, expected a larger shape: the gaps of this one have no mean that can be computed")
    return window
