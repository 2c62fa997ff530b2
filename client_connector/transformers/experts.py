"""An experts implementation for transformers' experts interface: push, own GEMM, wait, add; twice.

Shapes: T tokens, k experts each, N = T * k entries sorted by expert, H hidden, I ffn.
Covers what `use_experts_implementation` covers: transposed weights, biases, custom gates,
interleaved gate/up (the wire always has [gate | up]).
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch.nn import functional

from client_connector.forward_pass import ForwardPass
from client_connector.routing import Message
from lora_server.spec import Site


def experts_forward(
    forward: ForwardPass,
    layer: int,
    module: Any,
    x_TH: torch.Tensor,
    experts_Tk: torch.Tensor,
    weights_Tk: torch.Tensor,
) -> torch.Tensor:
    """The whole block of routed experts, with the deltas of `forward.batch`; returns [T, H] in x's dtype."""
    top_k = experts_Tk.shape[1]
    gate_up, down = Site(layer, "gate_up"), Site(layer, "down")
    expert_N, order_N = torch.sort(experts_Tk.reshape(-1), stable=True)
    kept = int((expert_N < module.num_experts).sum())  # ids beyond mean "not here" under expert parallelism
    expert_N, order_N = expert_N[:kept], order_N[:kept]
    counts = torch.bincount(expert_N, minlength=module.num_experts).tolist()
    place = torch.zeros_like(experts_Tk.reshape(-1), dtype=torch.int64)
    place[order_N] = torch.arange(kept, device=place.device)

    exchange = forward.start_experts(gate_up, experts_Tk, x_TH)
    began = time.monotonic_ns()
    hidden_NI = _grouped_linear(module, "gate_up_proj", x_TH[order_N // top_k], counts)
    forward.timed(gate_up, began)
    forward.finish(exchange, lambda message, delta: _add_gate_up(hidden_NI, message, delta, place, module))
    act_NI = module._apply_gate(hidden_NI)

    exchange = None
    if forward.acts_at(down):
        exchange = forward.start_experts(down, experts_Tk, act_NI[place], weights_Tk.reshape(-1).float())
    began = time.monotonic_ns()
    out_NH = _grouped_linear(module, "down_proj", act_NI, counts)
    out_NH = out_NH * weights_Tk.reshape(-1)[order_N, None]
    y_TH = torch.zeros_like(x_TH).index_add_(0, order_N // top_k, out_NH.to(x_TH.dtype))
    forward.timed(down, began)
    forward.finish(exchange, lambda message, delta: _add_rows(y_TH, message, delta))
    return y_TH


def _grouped_linear(module: Any, name: str, x_NK: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """Rows sorted by expert, `counts` of each, through that expert's weight."""
    weight, bias = getattr(module, name), getattr(module, f"{name}_bias", None)
    width = weight.shape[2] if module.is_transposed else weight.shape[1]
    out_NO = x_NK.new_empty(x_NK.shape[0], width)
    first = 0
    for expert, count in enumerate(counts):
        if count:
            rows = slice(first, first + count)
            matrix = weight[expert].t() if module.is_transposed else weight[expert]
            out_NO[rows] = functional.linear(x_NK[rows], matrix, None if bias is None else bias[expert])
            first += count
    return out_NO


def _add_gate_up(
    hidden_NI: torch.Tensor, message: Message, delta: torch.Tensor, place: torch.Tensor, module: Any
) -> None:
    rows = place[message.entries_N.to(place.device)]
    if module.is_concatenated:
        hidden_NI.index_add_(0, rows, delta)
        return
    gate, up = delta.chunk(2, dim=1)
    hidden_NI[:, 0::2].index_add_(0, rows, gate)
    hidden_NI[:, 1::2].index_add_(0, rows, up)


def _add_rows(y_TH: torch.Tensor, message: Message, delta: torch.Tensor) -> None:
    y_TH.index_add_(0, message.rows_M.to(y_TH.device), delta)
