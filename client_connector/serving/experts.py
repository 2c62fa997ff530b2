"""The expert sites of one layer of a serving engine's worker: push before the GEMM, add after it.

Shapes: T tokens, k experts each, H hidden, I ffn (of this rank), N = 2 * I.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch

from client_connector.exchange import Started
from client_connector.packing import Window
from client_connector.serving.planned import PlannedPass
from lora_server.spec import Site


@dataclass
class RemoteExperts:
    """One layer on one engine worker; `width` is the ffn columns that this rank has."""

    forward: PlannedPass
    layer: int
    gate_up: Window
    down: Window
    width: int
    weighted_input: bool = False  # the router's weights were applied to the layer's input already

    @classmethod
    def of_columns(cls, forward: PlannedPass, layer: int, begin: int, end: int, weighted_input: bool = False) -> Self:
        """Make the remote experts of a rank that has the ffn columns from `begin` to `end` of each of its experts."""
        spec = forward.client.terms.spec
        ffn = spec.ffn_at(layer)
        gate_up = Window(0, ((begin, end), (ffn + begin, ffn + end)))
        down = Window(begin, ((0, spec.out_width(Site(layer, "down"))),))
        return cls(forward, layer, gate_up, down, end - begin, weighted_input)

    def start_gate_up(
        self,
        x_TH: torch.Tensor,
        ids_Tk: torch.Tensor,
        expert_map: torch.Tensor | None,
        pass_rows_T: torch.Tensor | None = None,
    ) -> Started | None:
        """Push what this rank's experts will read. `pass_rows_T`: of rows that were dispatched, see Batch.at."""
        if not self.forward.sites.active:
            return None
        experts = self._experts(ids_Tk, expert_map)
        site = Site(self.layer, "gate_up")
        return self.forward.sites.start_experts(site, experts, x_TH, None, self.gate_up, pass_rows_T)

    def finish_gate_up(self, step: Started | None, y: torch.Tensor, interleaved: bool = False) -> None:
        """Add to y [T * k, N], columns [gate | up] or, interleaved, gate and up alternating."""
        half, width = y.shape[1] // 2, self.width
        gate, up = (y[:, 0 : 2 * width : 2], y[:, 1 : 2 * width : 2]) if interleaved else (y[:, :width], y[:, half:])
        self.forward.sites.add(step, [(gate, 0), (up[:, :width], width)], per_entry=True)

    def start_down(
        self,
        x_NI: torch.Tensor,
        ids_Tk: torch.Tensor,
        weights_Tk: torch.Tensor,
        expert_map: torch.Tensor | None,
        pass_rows_T: torch.Tensor | None = None,
    ) -> Started | None:
        """Push activations [T * k, >= I], which come back weighted and summed per token; see start_gate_up."""
        if not self.forward.sites.active:
            return None
        weights = weights_Tk.reshape(-1).float()
        weights = torch.ones_like(weights) if self.weighted_input else weights
        experts = self._experts(ids_Tk, expert_map)
        site, x = Site(self.layer, "down"), x_NI[:, : self.width]
        return self.forward.sites.start_experts(site, experts, x, weights, self.down, pass_rows_T)

    def finish_down(self, step: Started | None, y_TH: torch.Tensor) -> None:
        """Add to the layer's output."""
        self.forward.sites.add(step, [(y_TH, 0)])

    def _experts(self, ids_Tk: torch.Tensor, expert_map: torch.Tensor | None) -> torch.Tensor:
        """Return global ids; those of padding (-1) and of other ranks' experts become E, which stands for no expert."""
        ids = ids_Tk.long()
        absent = ids < 0
        if expert_map is not None:
            absent = absent | (expert_map[ids.clamp(min=0)] < 0)
        return torch.where(absent, self.forward.client.terms.spec.experts, ids)
