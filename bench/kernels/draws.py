"""Seeded draws of a decoding step: each token's adapter (Zipf) and the experts that it chose (uniform)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from bench.kernels.models import NUM_ADAPTERS, ZIPF, Model

NUM_DRAWS = 8


def popularity(num_adapters: int = NUM_ADAPTERS, exponent: float = ZIPF) -> npt.NDArray[np.float64]:
    """Return a Zipf law, p[i] ~ 1 / (i + 1) ** exponent, summing to 1."""
    weight = np.arange(1, num_adapters + 1, dtype=np.float64) ** -exponent
    return weight / weight.sum()


class Draw(NamedTuple):
    """One step of T tokens, k experts each."""

    experts_Tk: npt.NDArray[np.int32]
    weights_Tk: npt.NDArray[np.float32]
    adapters_T: npt.NDArray[np.int32]


def draw(model: Model, tokens: int, seed: int) -> Draw:
    """Every token has an adapter and k different experts; weights are positive and sum to 1."""
    rng = np.random.default_rng([seed, tokens])
    adapters = rng.choice(NUM_ADAPTERS, tokens, p=popularity())
    experts = np.argsort(rng.random((tokens, model.num_experts)), axis=1)[:, : model.top_k]
    weights = rng.random((tokens, model.top_k)) + 0.1
    weights /= weights.sum(axis=1, keepdims=True)
    return Draw(experts.astype(np.int32), weights.astype(np.float32), adapters.astype(np.int32))


def draws(model: Model, tokens: int, count: int = NUM_DRAWS) -> list[Draw]:
    """The rotating draws of a cell; the same in every run."""
    return [draw(model, tokens, seed) for seed in range(count)]


def distinct_pairs(step: Draw, num_experts: int) -> int:
    return len(np.unique(step.adapters_T[:, None].astype(np.int64) * num_experts + step.experts_Tk))
