"""Stands in for vLLM's PunicaWrapper at the expert sites of one layer.

Engine kernels that know LoRA (vLLM's TritonExperts) call `add_lora_w13` and `add_lora_w2`, on a
stream beside their base GEMM; our CPU experts call the `start_*` / `finish_*` pairs around theirs.
"""

from __future__ import annotations

from typing import Any

import torch

from client_connector.serving.experts import RemoteExperts


class RemotePunica(RemoteExperts):
    """The remote experts of one layer, under the names that vLLM's LoRAExpertsMixin calls."""

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
        """Add the delta to y [T, k, N]. Return what add_lora_w2 needs but does not get from vLLM."""
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
        """Add the delta, summed over experts, to the first of the k of y [T, k, H]; vLLM sums these later."""
        self.finish_down(self.start_down(x, topk_ids, topk_weights, expert_map), y[:, 0])
