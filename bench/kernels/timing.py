"""CUDA graphs replayed between events, with L2 flushed before each."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch

REPLAYS = 24  # of each draw
SLOW_US = 5_000.0
SLOW_REPLAYS = 5  # of each draw, where a replay takes longer than SLOW_US: with 8 draws 40 in all
FLUSH_BYTES = 256 << 20


class Flush:
    """Evicts what the last replay left in L2, by reading five times as much as it holds: lines that were written would
    go to memory while the next replay is timed."""

    def __init__(self, device: torch.device) -> None:
        self._buffer = torch.zeros(FLUSH_BYTES // 8, dtype=torch.int64, device=device)
        self._sum = torch.zeros((), dtype=torch.int64, device=device)

    def __call__(self) -> None:
        torch.sum(self._buffer, dim=0, out=self._sum)


def capture(run: Callable[[], None], device: torch.device) -> torch.cuda.CUDAGraph:
    """`run` as a graph, after two eager runs that compile and allocate what it needs."""
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        run()
        run()
    torch.cuda.current_stream(device).wait_stream(stream)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def _timed_us(run: Callable[[], None], flush: Callable[[], None], repeats: int, device: torch.device) -> list[float]:
    events = []
    for _ in range(repeats):
        flush()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        events.append((begin, end))
    torch.cuda.synchronize(device)
    return [begin.elapsed_time(end) * 1e3 for begin, end in events]


def median_us(run: Callable[[], None], device: torch.device, repeats: int = REPLAYS) -> float:
    """The median of `repeats` runs that follow each other, after one warm-up."""
    run()
    return statistics.median(_timed_us(run, lambda: None, repeats, device))


def replay_us(graphs: Sequence[torch.cuda.CUDAGraph], flush: Flush, device: torch.device) -> list[float]:
    """The median time of each graph; they take turns, so that each finds a cache that others used."""
    first = [_timed_us(graph.replay, flush, 1, device)[0] for graph in graphs]
    repeats = SLOW_REPLAYS if statistics.median(first) > SLOW_US else REPLAYS
    times: list[list[float]] = [[] for _ in graphs]
    for _ in range(repeats):
        for graph, found in zip(graphs, times, strict=True):
            found += _timed_us(graph.replay, flush, 1, device)
    return [statistics.median(found) for found in times]
