"""ServeGen (alibaba/ServeGen): one file per client, with its rate and burstiness per window of time.

Clients stand for adapters. A line is: window start (s), requests/s, CV of the gaps, family (Gamma or
Weibull), its two parameters (shape, scale in s); a window without traffic has an empty family.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from provisioning.arrays import Floats
from provisioning.inputs import InputError, normalised
from provisioning.workload.requests import Lengths, Requests
from provisioning.workload.workload import Workload

_FAMILIES = ("Gamma", "Weibull")
_LARGEST_CV = 10.0  # a longer-tailed renewal process does not settle within a run; some windows claim 170


@dataclass(frozen=True)
class Window:
    """Traffic of one client from `start_s` on: mean rate, CV and law of the gaps between requests."""

    start_s: float
    rate: float
    cv: float
    family: str
    shape: float
    scale_s: float

    def gaps(self, rng: np.random.Generator, num: int) -> Floats:
        """Gaps in seconds with the window's mean rate."""
        if self.family == "Weibull":
            drawn = rng.weibull(self.shape, num)
        elif self.family == "Gamma":
            drawn = rng.gamma(self.shape, 1.0, num)
        else:
            drawn = rng.exponential(size=num)
        return np.asarray(drawn / _unit_mean(self.family, self.shape) / self.rate)


def _median_cv(series: tuple[Window, ...]) -> float:
    busy = sorted((window.cv, window.rate) for window in series if window.rate > 0)
    if not busy:
        return 1.0
    requests = np.cumsum([rate for _, rate in busy])
    return min(busy[int(np.searchsorted(requests, requests[-1] / 2))][0], _LARGEST_CV)


def _unit_mean(family: str, shape: float) -> float:
    from scipy.special import gamma

    return {"Weibull": float(gamma(1 + 1 / shape)) if shape else 1.0, "Gamma": shape}.get(family, 1.0)


@dataclass(frozen=True)
class Clients:
    """All clients of one ServeGen directory, in the order of their numbers."""

    path: Path
    names: tuple[str, ...]
    windows: tuple[tuple[Window, ...], ...]

    def mean_rates(self) -> Floats:
        """Requests/s per client over the whole trace."""
        return np.array([np.mean([window.rate for window in series]) for series in self.windows])

    def burstiness(self) -> Floats:
        """CV per client: the median over its requests, 1 where it never calls. Within windows, not across."""
        return np.array([_median_cv(series) for series in self.windows])

    def workload(self) -> Workload:
        """Popularity by mean rate and the clients' own CV; the files give no lengths, which stay assumed."""
        return Workload(
            popularity=normalised(self.mean_rates(), "--trace"),
            cv=self.burstiness(),
            given_rate=float(self.mean_rates().sum()),
            source=f"{self.path}: {len(self.names)} ServeGen clients as adapters",
        )

    def requests(
        self, *, start_s: float, span_s: float, seed: int, rate: float | None = None, lengths: Lengths | None = None
    ) -> Requests:
        """Calls of all clients in [start, start + span), each window by its own law.

        `rate` thins or thickens all clients alike to that mean total of requests/s.
        """
        rng = np.random.default_rng(seed)
        factor = 1.0 if rate is None else rate / max(self._offered(start_s, span_s) / span_s, 1e-12)
        times, owners = [], []
        for client, series in enumerate(self.windows):
            for window, end_s in _spans(series):
                begin, end = max(window.start_s, start_s), min(end_s, start_s + span_s)
                if window.rate > 0 and end > begin:
                    arrivals = _renewals(rng, window, (end - begin) * factor) / factor + begin - start_s
                    times.append(arrivals)
                    owners.append(np.full(arrivals.size, client))
        arrival_s = np.concatenate(times) if times else np.empty(0)
        if not arrival_s.size:
            raise InputError(f"--trace: {self.path} has no traffic in [{start_s:g}, {start_s + span_s:g}) s")
        order = np.argsort(arrival_s, kind="stable")
        return Requests(
            arrival_s=arrival_s[order],
            adapter=np.concatenate(owners)[order].astype(np.int64),
            output_tokens=(lengths or Lengths()).sample(rng, arrival_s.size),
            num_adapters=len(self.names),
            names=self.names,
        )

    def _offered(self, start_s: float, span_s: float) -> float:
        overlaps = (
            window.rate * max(min(end_s, start_s + span_s) - max(window.start_s, start_s), 0.0)
            for series in self.windows
            for window, end_s in _spans(series)
        )
        return float(sum(overlaps))


def _spans(series: tuple[Window, ...]) -> list[tuple[Window, float]]:
    length = series[1].start_s - series[0].start_s if len(series) > 1 else 600.0
    return [(window, window.start_s + length) for window in series]


def _renewals(rng: np.random.Generator, window: Window, span_s: float) -> Floats:
    times: list[Floats] = []
    now = -float(rng.random() * window.gaps(rng, 1)[0])
    while now < span_s:
        block = now + np.cumsum(window.gaps(rng, int(window.rate * span_s * 1.2) + 16))
        times.append(block)
        now = float(block[-1])
    arrivals = np.concatenate(times)
    return np.asarray(arrivals[(arrivals >= 0) & (arrivals < span_s)])


def load(directory: Path) -> Clients:
    """Reads `chunk-N-trace.csv` of a directory; raises InputError naming file and line."""
    files = sorted(directory.glob("chunk-*-trace.csv"), key=lambda file: (len(file.name), file.name))
    if not files:
        raise InputError(f"--trace: {directory} holds no chunk-*-trace.csv; expected a ServeGen directory or a file")
    names = tuple(file.name.removesuffix("-trace.csv") for file in files)
    return Clients(directory, names, tuple(_series(file) for file in files))


def _series(file: Path) -> tuple[Window, ...]:
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


def _window(row: list[str], where: str) -> Window:
    got = f"{where}: got {','.join(row)!r}"
    try:
        start, rate, cv, family, shape, scale = row
        window = Window(float(start), float(rate), float(cv), family.strip(), float(shape), float(scale))
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
