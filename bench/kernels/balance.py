"""A model, without a GPU: how long the slowest warp of a step computes, by what its jobs are said to cost.

A warp computes tile by tile: one that serves up to 8 rows takes it TILE_US, each further 8 rows (a band) a part of
that again. Both are assumed, not measured. No step is faster than its bytes or than its slowest warp; the bandwidth
that warps take from each other, and everything else, is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from bench.kernels.draws import draws
from bench.kernels.models import Model, Site
from kernels_cuda.heuristics import WARPS
from kernels_cuda.shares import BAND_ROWS, Ints, job_cost, rows_of_jobs, shares
from kernels_cuda.sizes import CHUNKS, TILE_BYTES

WORKERS = 132 * WARPS  # H100, H200
TILE_US = 1.0  # of a warp whose copies never wait for those of others
BAND = {"shrink": 0.75, "expand": 0.375}  # of TILE_US: a band's MMAs are one chain with A, four with B
NUM_DRAWS = 4

Cost = Callable[[Ints], Ints]


class Phase(NamedTuple):
    """One phase of one step: entries and tiles of each of its jobs."""

    name: str
    rows_J: Ints
    tiles_J: Ints

    @property
    def nbytes(self) -> int:
        return int(self.tiles_J.sum()) * TILE_BYTES

    def times(self, band: float) -> npt.NDArray[np.float64]:
        return self.tiles_J * (1 + band * (-(-self.rows_J // BAND_ROWS) - 1))

    def mean(self, band: float) -> float:
        return float(self.times(band).sum()) / WORKERS

    def slowest(self, cost: Cost, band: float) -> float:
        through = np.concatenate([[0.0], np.cumsum(self.times(band))])
        return float(np.diff(through[shares(cost(self.rows_J), WORKERS)]).max())


def phases(model: Model, site: Site, tokens: int) -> Iterator[tuple[Phase, Phase]]:
    shape = site.shape
    tiles = [min(CHUNKS, shape.num_chunks - first) for first in range(0, shape.num_chunks, CHUNKS)]
    per_block = np.repeat(np.array(tiles, np.int64), shape.groups)
    for step in draws(model, tokens, NUM_DRAWS):
        pairs = step.adapters_T[:, None].astype(np.int64) * model.num_experts + step.experts_Tk
        rows_S = np.unique(pairs, return_counts=True)[1].astype(np.int64)
        shrink = rows_of_jobs(rows_S, np.full(len(rows_S), len(per_block)))
        expand = rows_of_jobs(rows_S, np.full(len(rows_S), shape.num_expand_jobs))
        yield (
            Phase("shrink", shrink, np.tile(per_block, len(shrink) // len(per_block))),
            Phase("expand", expand, np.ones(len(expand), np.int64)),
        )


def equal(rows_J: Ints) -> Ints:
    return np.ones_like(rows_J)


def table(models: list[Model], tokens: list[int], gbps: float) -> list[dict[str, Any]]:
    """A row per model, number of tokens, site and phase; us, means over the draws."""
    rows = []
    for model, count, site in [(m, t, s) for m in models for t in tokens for s in m.sites]:
        for phase in zip(*phases(model, site, count), strict=True):
            name = phase[0].name
            rows.append(
                {
                    "model": model.name,
                    "tokens": count,
                    "site": site.name,
                    "phase": name,
                    "bytes_us": float(np.mean([draw.nbytes for draw in phase])) / gbps / 1e3,
                    "equal_us": float(np.mean([draw.slowest(equal, BAND[name]) for draw in phase])) * TILE_US,
                    "weighed_us": float(np.mean([draw.slowest(job_cost, BAND[name]) for draw in phase])) * TILE_US,
                }
            )
    return rows


def of_bands(tile: int, band: int) -> Cost:
    """A cost of so much, and so much more for each band."""
    return lambda rows_J: tile + band * -(-rows_J // BAND_ROWS)


COSTS = {
    "1": equal,
    "3 + bands": of_bands(3, 1),
    "1 + bands": of_bands(1, 1),
    "1 + 2 bands": job_cost,
    "1 + 3 bands": of_bands(1, 3),
    "bands": of_bands(0, 1),
}
BANDS = (0.0, 0.25, 0.375, 0.5, 0.75, 1.0)


def unevenness(models: list[Model], tokens: list[int]) -> list[dict[str, Any]]:
    """A row per cost: by how many percent the slowest warp exceeds the average one, by a band's part of TILE_US.

    Each figure is the mean over all models, numbers of tokens, sites, phases and draws.
    """
    every = [phase for m in models for t in tokens for s in m.sites for pair in phases(m, s, t) for phase in pair]

    def percent(cost: Cost, band: float) -> float:
        return float(np.mean([phase.slowest(cost, band) / phase.mean(band) - 1 for phase in every])) * 100

    return [
        {"cost": name} | {f"band {band:g} %": percent(cost, band) for band in BANDS} for name, cost in COSTS.items()
    ]
