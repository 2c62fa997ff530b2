"""The expert sites of one layer of a serving engine's worker: push before the GEMM, add after it.

Shapes: T tokens, k experts each, H hidden, I ffn (of this rank), N = 2 * I.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from client_connector.exchange import Exchange
from client_connector.packing import Window
from client_connector.routing import Message
from client_connector.serving.planned import PlannedPass
from client_connector.serving.staging import add_rows
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

    def start_gate_up(
        self, x_TH: torch.Tensor, ids_Tk: torch.Tensor, expert_map: torch.Tensor | None
    ) -> Exchange | None:
        """Push what this rank's experts will read."""
        if not self.forward.active:
            return None
        experts = self._experts(ids_Tk, expert_map)
        return self.forward.start_experts(Site(self.layer, "gate_up"), experts, x_TH, window=self.gate_up)

    def finish_gate_up(self, exchange: Exchange | None, y: torch.Tensor, interleaved: bool = False) -> None:
        """Add to y [T * k, N], columns [gate | up] or, interleaved, gate and up alternating."""
        if exchange is None:
            return
        half, width = y.shape[1] // 2, self.width
        gate, up = (y[:, 0 : 2 * width : 2], y[:, 1 : 2 * width : 2]) if interleaved else (y[:, :width], y[:, half:])

        def add(message: Message, delta: torch.Tensor) -> None:
            add_rows(gate, message.entries_N, delta[:, :width])
            add_rows(up[:, :width], message.entries_N, delta[:, width:])

        self.forward.finish(exchange, add)

    def start_down(
        self, x_NI: torch.Tensor, ids_Tk: torch.Tensor, weights_Tk: torch.Tensor, expert_map: torch.Tensor | None
    ) -> Exchange | None:
        """Push activations [T * k, >= I], which come back weighted and summed per token."""
        if not self.forward.active:
            return None
        weights = weights_Tk.reshape(-1).float()
        return self.forward.start_experts(
            Site(self.layer, "down"),
            self._experts(ids_Tk, expert_map),
            x_NI[:, : self.width],
            weights=torch.ones_like(weights) if self.weighted_input else weights,
            window=self.down,
        )

    def finish_down(self, exchange: Exchange | None, y_TH: torch.Tensor) -> None:
        """Add to the layer's output."""

        def add(message: Message, delta: torch.Tensor) -> None:
            add_rows(y_TH, message.rows_M, delta)

        self.forward.finish(exchange, add)

    def _experts(self, ids_Tk: torch.Tensor, expert_map: torch.Tensor | None) -> torch.Tensor:
        """Global ids; under expert parallelism those of other ranks, and padding's -1, become E: not here."""
        ids = ids_Tk.long()
        absent = ids < 0
        if expert_map is not None:
            absent = absent | (expert_map[ids.clamp(min=0)] < 0)
        return torch.where(absent, self.forward.client.terms.spec.experts, ids)
