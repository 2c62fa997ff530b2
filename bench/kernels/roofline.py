"""Predictions from byte counts, without a GPU: the floor, and the bytes that our layout and workspace add to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bench.kernels.draws import popularity
from bench.kernels.models import ELEMENT_BYTES, Model, Site
from kernels_cuda.layout import GROUP
from kernels_cuda.sizes import CHUNK, CHUNKS, TILE_BYTES


def expected_pairs(model: Model, tokens: int) -> float:
    """Return the mean distinct (adapter, expert) pairs of a step, E * sum_i [1 - (1 - p_i k / E)^T]."""
    p = popularity()
    return float(model.num_experts * (1 - (1 - p * model.top_k / model.num_experts) ** tokens).sum())


@dataclass(frozen=True)
class Bytes:
    """One site in one step, in bytes."""

    shrink_weights: float
    expand_weights: float
    rows: float
    results: float

    @property
    def weights(self) -> float:
        return self.shrink_weights + self.expand_weights

    @property
    def total(self) -> float:
        return self.weights + self.rows + self.results


def distinct_bytes(model: Model, site: Site, tokens: int, pairs: float) -> Bytes:
    """Count the bytes of a site when a step meets `pairs` distinct (adapter, expert) pairs.

    gate_up reads a row per token and writes one per (token, expert); down reads one per (token, expert) and
    writes one per token, which is the least that this contract allows.
    """
    entries = tokens * model.top_k
    rows, results = (entries, tokens) if site.combine else (tokens, entries)
    return Bytes(
        pairs * site.a_bytes,
        pairs * site.b_bytes,
        rows * site.in_width * ELEMENT_BYTES,
        results * site.out_width * ELEMENT_BYTES,
    )


GBPS = 4300.0  # H200: bytes read plus bytes written per second of a device-to-device copy
FLOAT_BYTES = 4


def workspace_bytes(model: Model, site: Site, tokens: int) -> float:
    """Count the bytes of partials, v and deltas, each written once and read once. Most of it stays in L2."""
    entries = tokens * model.top_k
    rank = site.shape.groups * GROUP
    partials = -(-site.in_width // (CHUNK * CHUNKS))
    floats = entries * rank * (partials + 1) + (entries * site.out_width if site.combine else 0)
    return 2.0 * FLOAT_BYTES * floats


def row(model: Model, site: Site, tokens: int, gbps: float) -> dict[str, Any]:
    """Make one line of the table; times in us at `gbps`."""
    pairs = expected_pairs(model, tokens)
    least = distinct_bytes(model, site, tokens, pairs)
    reads = pairs * site.shape.read_bytes + least.rows + least.results
    extra = workspace_bytes(model, site, tokens)
    return {
        "model": model.name,
        "tokens": tokens,
        "site": site.name,
        "distinct_pairs": pairs,
        "rows_per_segment": tokens * model.top_k / pairs,
        "weights_mb": least.weights / 1e6,
        "shrink_us": (least.shrink_weights + least.rows) / gbps / 1e3,
        "expand_us": (least.expand_weights + least.results) / gbps / 1e3,
        "floor_us": least.total / gbps / 1e3,
        "ours_mb": reads / 1e6,
        "workspace_mb": extra / 1e6,
        "tiles": pairs * site.shape.read_bytes / TILE_BYTES,
        # bounds on floor / time at the same bandwidth: the workspace all in memory, and all in L2
        "ratio_workspace_in_memory": least.total / (reads + extra),
        "ratio_workspace_in_l2": least.total / reads,
    }


def table(models: list[Model], tokens: list[int], gbps: float = GBPS) -> list[dict[str, Any]]:
    """Make a row per model, number of tokens and site."""
    return [row(model, site, count, gbps) for model in models for count in tokens for site in model.sites]
