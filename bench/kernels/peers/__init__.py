"""Other projects' kernels, from files that bench/fetch_peers.py took out of their published wheels.

A peer computes one row per (token, expert) into `PeerStep.out`; none of them sums over a token's experts, which
our `down` does: their engines do it afterwards, and here they are spared it. Weights of all peers are the same
two tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from bench.kernels.draws import Draw
from bench.kernels.models import NUM_ADAPTERS, Model, Site
from bench.kernels.ours import DTYPE, fill, relative_error


class PeerMissingError(Exception):
    """A peer cannot be loaded here; the message says why."""


@dataclass(frozen=True)
class PeerWeights:
    """512 adapters of one site: A [512 * E, slices * R, K], B [512 * E, slices * O, R], bf16."""

    model: Model
    site: Site
    a_XRK: torch.Tensor
    b_XOR: torch.Tensor

    @staticmethod
    def random(model: Model, site: Site, generator: torch.Generator, num_adapters: int = NUM_ADAPTERS) -> PeerWeights:
        planes, ranks = num_adapters * model.num_experts, site.slices * site.lora_rank
        a = torch.empty(planes, ranks, site.in_width, dtype=DTYPE, device=generator.device)
        b = torch.empty(planes, site.out_width, site.lora_rank, dtype=DTYPE, device=generator.device)
        fill(a, generator)
        fill(b, generator)
        return PeerWeights(model, site, a, b)

    @property
    def num_adapters(self) -> int:
        return self.a_XRK.shape[0] // self.model.num_experts


@dataclass(frozen=True)
class PeerStep:
    """One draw on the device. rows: [T, K] for gate_up, [T * k, K] for down. out: [T * k, slices * O], poisoned."""

    draw: Draw
    rows: torch.Tensor
    out: torch.Tensor
    experts_Tk: torch.Tensor
    weights_Tk: torch.Tensor
    adapters_T: torch.Tensor

    @staticmethod
    def make(site: Site, draw: Draw, rows: torch.Tensor) -> PeerStep:
        device = rows.device
        out = torch.full((draw.experts_Tk.size, site.out_width), float("nan"), dtype=DTYPE, device=device)
        return PeerStep(draw, rows, out, *(torch.from_numpy(array).to(device) for array in draw))


@dataclass(frozen=True)
class Prepared:
    """`run` fills the step's out from ready routing; `with_routing` does the routing too, or is None if it cannot."""

    run: Callable[[], None]
    with_routing: Callable[[], None] | None
    weighted: bool  # whether run multiplies by the routing weights


class Peer(Protocol):
    name: str
    about: str

    def options(self, site: Site, tokens: int) -> list[dict[str, Any]]:
        """List the settings that its authors leave open; the bench tries all, and the fastest counts."""

    def prepare(self, weights: PeerWeights, step: PeerStep, options: dict[str, Any]) -> Prepared:
        """Do all work that does not depend on the rows; it is outside the measured time."""


def load(name: str, directory: Path) -> Peer:
    """Load a peer. Raises PeerMissingError if it cannot be loaded, whatever the reason."""
    from bench.kernels.peers import punica, sglang, vllm

    loaders: dict[str, Callable[[Path], Peer]] = {"vllm": vllm.load, "sglang": sglang.load, "punica": punica.load}
    if name not in loaders:
        raise PeerMissingError(f"got peer {name!r}, expected one of {', '.join(loaders)}")
    if not directory.is_dir():
        raise PeerMissingError(
            f"{directory} is missing; run `python -m bench.fetch_peers --out {directory}` beforehand"
        )
    try:
        return loaders[name](directory)
    except Exception as error:
        raise PeerMissingError(f"{type(error).__name__}: {error}") from error


def sampled_error(weights: PeerWeights, step: PeerStep, weighted: bool, count: int, seed: int) -> float:
    """Return the largest norm-wise relative error of sampled rows, against fp32 with the same weights."""
    site, model = weights.site, weights.model
    (experts, factors, adapters), rank = step.draw, weights.site.lora_rank
    generator = torch.Generator().manual_seed(seed)
    worst = 0.0
    for pair in torch.randperm(experts.size, generator=generator)[:count].tolist():
        token = pair // model.top_k
        plane = int(adapters[token]) * model.num_experts + int(experts.reshape(-1)[pair])
        x = step.rows[pair if site.combine else token].float()
        v = weights.a_XRK[plane].float() @ x
        parts = [
            weights.b_XOR[plane, i * site.slice_width : (i + 1) * site.slice_width].float()
            @ v[i * rank : (i + 1) * rank]
            for i in range(site.slices)
        ]
        expected = torch.cat(parts) * (float(factors.reshape(-1)[pair]) if weighted else 1.0)
        worst = max(worst, relative_error(step.out[pair], expected.double()))
    return worst
