"""ServeGen (alibaba/ServeGen): two files per client, of its rate and burstiness and of its output lengths over time.

Clients stand for adapters. For `chunk-N-trace.csv` see `servegen_windows`, for `chunk-N-dataset.json`
`servegen_lengths`; a client without the latter has lengths that are assumed.

Legend: C clients, W windows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from provisioning.arrays import Floats
from provisioning.inputs import InputError, normalised, positive
from provisioning.workload import servegen_lengths, servegen_windows
from provisioning.workload.replay import LoadOverTime
from provisioning.workload.requests import Lengths, Requests
from provisioning.workload.servegen_lengths import Period
from provisioning.workload.servegen_windows import ArrivalWindow
from provisioning.workload.workload import Workload


@dataclass(frozen=True)
class ServegenClients:
    """Clients of one ServeGen directory, in the order of their numbers, with the same windows each."""

    path: Path
    names: tuple[str, ...]
    windows: tuple[tuple[ArrivalWindow, ...], ...]
    periods: tuple[tuple[Period, ...], ...]

    @cached_property
    def rates(self) -> Floats:
        """Requests/s, CW."""
        return np.array([[window.rate for window in series] for series in self.windows])

    @cached_property
    def tokens(self) -> Floats:
        """Mean output tokens of a request, CW."""
        assumed = Lengths().mean_tokens
        return np.array(
            [
                [servegen_lengths.at(periods, window.start_s).mean if periods else assumed for window in series]
                for series, periods in zip(self.windows, self.periods, strict=True)
            ]
        )

    def workload(self, window_s: float | None = None) -> Workload:
        """Select the windows with the largest load, as many as `window_s` takes (one, if it is not given).

        Clients that are idle in these windows get no requests. Lengths and rate are means over all time; the peak is
        the load of these windows.
        """
        width_s = servegen_windows.width_s(self.windows[0])
        if window_s is not None:
            positive(window_s, "--window")
        load_W = (self.rates * self.tokens).sum(axis=0)
        num = min(math.ceil((window_s or width_s) / width_s - 1e-9), load_W.size)
        rolling = np.convolve(load_W, np.full(num, 1 / num), "valid")
        first = int(np.argmax(rolling))
        rates_CP, tokens_CP = self.rates[:, first : first + num], self.tokens[:, first : first + num]
        rates_C = rates_CP.mean(axis=1)
        popularity = normalised(rates_C, f"--trace: {self.path}: requests/s")
        tokens_C = (rates_CP * tokens_CP).mean(axis=1) / np.maximum(rates_C, 1e-300)
        mean = float(load_W.sum() / self.rates.sum())
        start_s, active = self.windows[0][first].start_s, int(np.count_nonzero(rates_C))
        known = sum(bool(periods) for periods in self.periods)

        def generate(num_requests: int, seed: int) -> Requests:
            span_s = num * width_s
            return self.requests(start_s=start_s, span_s=span_s, seed=seed, rate=num_requests / span_s)

        return Workload(
            popularity=popularity,
            tokens=np.where(rates_C > 0, tokens_C, mean),
            lengths=Lengths(mean_tokens=mean, source=f"{known:,} chunk-*-dataset.json" if known else ""),
            given_rate=float(self.rates.sum(axis=0).mean()),
            source=f"{self.path}: {len(self.names)} ServeGen clients as adapters, {active} of them active at the peak",
            generate=generate,
            names=self.names,
            over_time=LoadOverTime(
                window_s=num * width_s,
                start_s=start_s,
                fullest=float(rolling[first] / load_W.mean()),
                load_W=load_W[: load_W.size // num * num].reshape(-1, num).mean(axis=1) / load_W.mean(),
            ),
        )

    def requests(self, *, start_s: float, span_s: float, seed: int, rate: float | None = None) -> Requests:
        """Draw the calls of all clients in [start, start + span), each window by its own law, with its own lengths.

        `rate` thins or thickens all clients alike to that mean total of requests/s.
        """
        rng = np.random.default_rng(seed)
        busy = list(self._busy(start_s, start_s + span_s))
        offered = float(sum(window.rate * (end - begin) for _, window, begin, end in busy))
        factor = 1.0 if rate is None else rate / max(offered / span_s, 1e-12)
        times, owners, tokens = [], [], []
        for client, window, begin, end in busy:
            arrivals = servegen_windows.renewals(rng, window, (end - begin) * factor) / factor + begin - start_s
            periods = self.periods[client]
            law = servegen_lengths.at(periods, window.start_s) if periods else Lengths()
            times.append(arrivals)
            owners.append(np.full(arrivals.size, client))
            tokens.append(law.sample(rng, arrivals.size))
        arrival_s = np.concatenate(times) if times else np.empty(0)
        if not arrival_s.size:
            raise InputError(f"--trace: {self.path} has no traffic in [{start_s:g}, {start_s + span_s:g}) s")
        order = np.argsort(arrival_s, kind="stable")
        return Requests(
            arrival_s=arrival_s[order],
            adapter=np.concatenate(owners)[order].astype(np.int64),
            output_tokens=np.concatenate(tokens)[order],
            num_adapters=len(self.names),
            names=self.names,
        )

    def _busy(self, start_s: float, end_s: float) -> Iterator[tuple[int, ArrivalWindow, float, float]]:
        """Yield (client, window, begin, end) of what windows with traffic have in common with [start, end)."""
        for client, series in enumerate(self.windows):
            width_s = servegen_windows.width_s(series)
            for window in series:
                begin, end = max(window.start_s, start_s), min(window.start_s + width_s, end_s)
                if window.rate > 0 and end > begin:
                    yield client, window, begin, end


def load(directory: Path) -> ServegenClients:
    """Load the clients of a directory; raises InputError that names the file, and the line of a table."""
    files = sorted(directory.glob("chunk-*-trace.csv"), key=lambda file: (len(file.name), file.name))
    if not files:
        raise InputError(f"--trace: {directory} holds no chunk-*-trace.csv; expected a ServeGen directory or a file")
    names = tuple(file.name.removesuffix("-trace.csv") for file in files)
    windows = tuple(servegen_windows.read(file) for file in files)
    starts = [[window.start_s for window in series] for series in windows]
    for file, own in zip(files, starts, strict=True):
        if own != starts[0]:
            raise InputError(
                f"--trace: {file} has other windows than {files[0].name}; expected the same for all clients"
            )
    periods = tuple(servegen_lengths.read(directory / f"{name}-dataset.json") for name in names)
    return ServegenClients(directory, names, windows, periods)
