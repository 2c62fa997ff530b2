"""Hooks of the expert sites on a CPU. Shapes: T tokens, k experts each, N = T * k entries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.layers.moe import fused_moe_native
from torch.nn import functional

from client_connector.serving.experts import RemoteExperts
from client_connector.serving.planned import PlannedPass
from client_connector.serving.wrapping import Wrap
from lora_server.errors import ConfigError

EXPERTS = "lora_server_experts"  # attribute of a layer of ours


def attach_experts(module: Any, forward: PlannedPass, layer: int) -> None:
    """Give a layer its remote experts; raises ConfigError for experts that `_moe_forward_native` does not compute."""
    weight, config = module.w13_weight, module.moe_runner_config
    spec = forward.client.terms.spec
    width = spec.ffn_at(layer) // module.moe_tp_size
    for name, got, expected in (
        ("device", weight.device.type, "cpu"),
        ("intel_amx", getattr(module, "use_intel_amx_backend", False), False),
        ("moe_ep_size", module.moe_ep_size, 1),
        ("activation", config.activation, "silu"),
        ("gemm1_alpha", config.gemm1_alpha, None),
        ("w13_weight_bias", getattr(module, "w13_weight_bias", None) is not None, False),
        ("rows of w13", tuple(weight.shape[:2]), (spec.experts, 2 * width)),
    ):
        if got != expected:
            raise ConfigError(
                f"experts of layer {layer}, {name}: got {got}, expected {expected}; such experts are not supported "
                "with the LoRA server on SGLang yet"
            )
    begin = module.moe_tp_rank * width
    setattr(module, EXPERTS, RemoteExperts.of_columns(forward, layer, begin, begin + width))


def install(wrap: Wrap) -> None:
    """Wrap SGLang's experts for CPUs without kernels."""
    wrap(fused_moe_native, "moe_forward_native", _moe_forward_native)


def _moe_forward_native(original: Any) -> Callable[..., torch.Tensor]:
    """Push, own GEMM, wait, add; for each of the two GEMMs. Steps without adapter rows call SGLang's own function."""

    def forward(layer: Any, x: torch.Tensor, topk_output: Any, config: Any) -> torch.Tensor:
        remote: RemoteExperts | None = getattr(layer, EXPERTS, None)
        if remote is None or not remote.forward.sites.active:
            result: torch.Tensor = original(layer, x, topk_output, config)
            return result
        weights_Tk, ids_Tk, _ = topk_output
        entries = [(ids_Tk.reshape(-1) == expert).nonzero().squeeze(1) for expert in range(len(layer.w13_weight))]
        step = remote.start_gate_up(x, ids_Tk, None)
        gate_up_N = _by_expert(x.repeat_interleave(ids_Tk.shape[1], 0), layer.w13_weight, entries)
        remote.finish_gate_up(step, gate_up_N)
        gate_N, up_N = gate_up_N.chunk(2, 1)
        active_N = functional.silu(gate_N) * up_N
        step = remote.start_down(active_N, ids_Tk, weights_Tk, None)
        down_N = _by_expert(active_N, layer.w2_weight, entries)
        y: torch.Tensor = (down_N.view(*ids_Tk.shape, -1) * weights_Tk.unsqueeze(-1)).sum(1).to(x.dtype)
        remote.finish_down(step, y)
        return y

    return forward


def _by_expert(x_N: torch.Tensor, weights_E: torch.Tensor, entries: list[torch.Tensor]) -> torch.Tensor:
    """Multiply each expert's entries by its weight."""
    y_N = x_N.new_zeros(len(x_N), weights_E.shape[1])
    for expert, mine in enumerate(entries):
        if len(mine):
            y_N[mine] = functional.linear(x_N[mine], weights_E[expert])
    return y_N
