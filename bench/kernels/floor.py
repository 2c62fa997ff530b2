"""The bytes that a step must move at least: every distinct weight, every row in and every result out, once each."""

from __future__ import annotations

from dataclasses import dataclass

from bench.kernels.draws import popularity
from bench.kernels.models import ELEMENT_BYTES, Model, Site


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
