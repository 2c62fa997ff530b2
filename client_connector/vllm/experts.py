"""What stands in for vLLM's PunicaWrapper at the expert sites of one layer.

Shapes: T tokens, k experts each, H hidden, I ffn (of this rank), N = 2 * I.

Engine kernels that know LoRA (vLLM's TritonExperts) call `add_lora_w13` and `add_lora_w2`, on a
stream beside their base GEMM; our CPU experts call the `start_*` / `finish_*` pairs around theirs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from client_connector.exchange import Exchange, Window
from client_connector.routing import Message
from client_connector.vllm.staging import add_rows
from client_connector.vllm.step import Step
from lora_server.spec import Site


@dataclass
class RemoteExperts:
    """One layer on one engine worker; `width` is the ffn columns that this rank has."""

    step: Step
    layer: int
    gate_up: Window
    down: Window
    width: int
    weighted_input: bool = False  # the router's weights were applied to the layer's input already

    # -- in two halves

    def start_gate_up(
        self, x_TH: torch.Tensor, ids_Tk: torch.Tensor, expert_map: torch.Tensor | None
    ) -> Exchange | None:
        """Push what this rank's experts will read."""
        if not self.step.active:
            return None
        site = Site(self.layer, "gate_up")
        return self.step.start_experts(site, self._experts(ids_Tk, expert_map), x_TH, self.gate_up)

    def finish_gate_up(self, exchange: Exchange | None, y: torch.Tensor, interleaved: bool = False) -> None:
        """Add to y [T * k, N], columns [gate | up] or, interleaved, gate and up alternating."""
        if exchange is None:
            return
        half, width = y.shape[1] // 2, self.width
        gate, up = (y[:, 0 : 2 * width : 2], y[:, 1 : 2 * width : 2]) if interleaved else (y[:, :width], y[:, half:])

        def add(message: Message, delta: torch.Tensor) -> None:
            add_rows(gate, message.entries_N, delta[:, :width])
            add_rows(up[:, :width], message.entries_N, delta[:, width:])

        self.step.finish(exchange, add)

    def start_down(
        self, x_NI: torch.Tensor, ids_Tk: torch.Tensor, weights_Tk: torch.Tensor, expert_map: torch.Tensor | None
    ) -> Exchange | None:
        """Push activations [T * k, >= I], which come back weighted and summed per token."""
        if not self.step.active:
            return None
        weights = weights_Tk.reshape(-1).float().cpu()
        return self.step.start_experts(
            Site(self.layer, "down"),
            self._experts(ids_Tk, expert_map),
            x_NI[:, : self.width],
            self.down,
            by_entry=True,
            weights=torch.ones_like(weights) if self.weighted_input else weights,
        )

    def finish_down(self, exchange: Exchange | None, y_TH: torch.Tensor) -> None:
        """Add to the layer's output."""
        if exchange is None:
            return

        def add(message: Message, delta: torch.Tensor) -> None:
            add_rows(y_TH, message.rows_M, delta)

        self.step.finish(exchange, add)

    def _experts(self, ids_Tk: torch.Tensor, expert_map: torch.Tensor | None) -> torch.Tensor:
        """Global ids; under expert parallelism those of other ranks, and padding's -1, become E: not here."""
        ids = ids_Tk.long()
        absent = ids < 0
        if expert_map is not None:
            absent = absent | (expert_map[ids.clamp(min=0)] < 0)
        return torch.where(absent, self.step.client.terms.spec.experts, ids).cpu()

    # -- as vLLM's LoRAExpertsMixin calls it

    def add_lora_w13(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: Any,
        lora_b_stacked: Any,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        expert_map: torch.Tensor | None,
        *unused: Any,
        **options: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None, None, None]:
        """y [T, k, N] += delta. What add_lora_w2 needs and is not given travels in the result."""
        rows = x.shape[0]
        self.finish_gate_up(self.start_gate_up(x, topk_ids, expert_map), y.view(rows * topk_ids.shape[1], -1))
        return topk_ids, expert_map, None, None

    def add_lora_w2(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: Any,
        lora_b_stacked: Any,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        expert_map: torch.Tensor | None,
        *unused: Any,
        **options: Any,
    ) -> None:
        """y [T, k, H]: the delta, summed over experts, goes to the first of the k, which are summed later."""
        self.finish_down(self.start_down(x, topk_ids, topk_weights, expert_map), y[:, 0])
