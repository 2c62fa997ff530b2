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
    """Run the block of routed experts with the deltas of `forward.batch`; returns [T, H] in x's dtype."""
    top_k = experts_Tk.shape[1]
    gate_up, down = Site(layer, "gate_up"), Site(layer, "down")
    groups = _way(x_TH, module)(experts_Tk.reshape(-1), module.num_experts)
    order_N, place = groups.order_N, groups.place_N

    exchange = forward.start_experts(gate_up, experts_Tk, x_TH)
    began = time.monotonic_ns()
    hidden_NI = _linear(groups, module, "gate_up_proj", x_TH[order_N // top_k])
    forward.timed(gate_up, began)
    forward.finish(exchange, lambda message, delta: _add_gate_up(hidden_NI, message, delta, place, module))
    act_NI = module._apply_gate(hidden_NI)

    exchange = None
    if forward.batch is not None and forward.batch.at(down) is not None:
        exchange = forward.start_experts(down, experts_Tk, act_NI[place], weights_Tk.reshape(-1).float())
    began = time.monotonic_ns()
    out_NH = _linear(groups, module, "down_proj", act_NI)
    out_NH = groups.kept(out_NH * weights_Tk.reshape(-1)[order_N, None])
    y_TH = torch.zeros_like(x_TH).index_add_(0, order_N // top_k, out_NH.to(x_TH.dtype))
    forward.timed(down, began)
    forward.finish(exchange, lambda message, delta: _add_rows(y_TH, message, delta))
    return y_TH


def _way(x_TH: torch.Tensor, module: Any) -> type[OnHost] | type[OnDevice]:
    """Return whether torch groups GEMMs on the GPU itself; its other way waits for the host, too."""
    fast = x_TH.is_cuda and x_TH.dtype == torch.bfloat16 and hasattr(functional, "grouped_mm")
    if not fast or torch.cuda.get_device_capability(x_TH.device)[0] not in (9, 10):
        return OnHost
    widths = (*module.gate_up_proj.shape[1:], *module.down_proj.shape[1:])
    return OnDevice if all(width % 8 == 0 for width in widths) else OnHost  # rows of 16 bytes and multiples


class OnHost:
    """Entries sorted by expert; those of experts beyond E ("not here", under expert parallelism) are left out.

    order_N: int64, the entry at each place; place_N: int64, the place of each entry.
    """

    def __init__(self, experts_N: torch.Tensor, num_experts: int) -> None:
        expert_N, order_N = torch.sort(experts_N, stable=True)
        self.order_N = order_N[: int((expert_N < num_experts).sum())]
        self.expert_N = expert_N[: len(self.order_N)]
        self._counts = torch.bincount(self.expert_N, minlength=num_experts).tolist()
        self.place_N = torch.zeros_like(experts_N, dtype=torch.int64)
        self.place_N[self.order_N] = torch.arange(len(self.order_N), device=experts_N.device)

    def multiply(self, x_NK: torch.Tensor, weight_EOK: torch.Tensor) -> torch.Tensor:
        """Return [N, O]: each row times its expert's weight, one expert at a time."""
        out_NO = x_NK.new_empty(x_NK.shape[0], weight_EOK.shape[1])
        first = 0
        for expert, count in enumerate(self._counts):
            if count:
                rows = slice(first, first + count)
                out_NO[rows] = functional.linear(x_NK[rows], weight_EOK[expert])
                first += count
        return out_NO

    def kept(self, out_NO: torch.Tensor) -> torch.Tensor:
        """Run every entry: none is elsewhere."""
        return out_NO


class OnDevice:
    """Run every entry on a GPU, without waiting for the host to read how many rows an expert has.

    Entries of experts beyond E are at the end; what `multiply` gives for them is not defined, and `kept` is zero.
    """

    def __init__(self, experts_N: torch.Tensor, num_experts: int) -> None:
        self._num_experts = num_experts
        expert_N, self.order_N = torch.sort(experts_N, stable=True)
        every_E = torch.arange(num_experts, device=expert_N.device, dtype=expert_N.dtype)
        self._ends_E = torch.searchsorted(expert_N, every_E, right=True).int()
        self._here_N1 = (expert_N < num_experts)[:, None]
        self.expert_N = expert_N.clamp(max=num_experts - 1)
        self.place_N = torch.empty_like(self.order_N)
        self.place_N[self.order_N] = torch.arange(len(expert_N), device=expert_N.device)

    def multiply(self, x_NK: torch.Tensor, weight_EOK: torch.Tensor) -> torch.Tensor:
        """Return [N, O]: each row times its expert's weight, in one launch."""
        return functional.grouped_mm(x_NK, weight_EOK.transpose(1, 2), offs=self._ends_E)

    def kept(self, out_NO: torch.Tensor) -> torch.Tensor:
        """Return the rows with zeros for entries of experts that are not on this rank."""
        return torch.where(self._here_N1, out_NO, 0)


def _linear(groups: OnHost | OnDevice, module: Any, name: str, x_NK: torch.Tensor) -> torch.Tensor:
    """Multiply rows, sorted by expert, by the module's weights and add its biases, in either layout of the weights."""
    weight, bias = getattr(module, name), getattr(module, f"{name}_bias", None)
    out_NO = groups.multiply(x_NK, weight.transpose(1, 2) if module.is_transposed else weight)
    return out_NO if bias is None else out_NO + bias[groups.expert_N]


def _add_gate_up(
    hidden_NI: torch.Tensor, message: Message, delta: torch.Tensor, place: torch.Tensor, module: Any
) -> None:
    rows = place[message.pairs_P.to(place.device, non_blocking=True)]
    if module.is_concatenated:
        hidden_NI.index_add_(0, rows, delta)
        return
    gate, up = delta.chunk(2, dim=1)
    hidden_NI[:, 0::2].index_add_(0, rows, gate)
    hidden_NI[:, 1::2].index_add_(0, rows, up)


def _add_rows(y_TH: torch.Tensor, message: Message, delta: torch.Tensor) -> None:
    y_TH.index_add_(0, message.rows_M.to(y_TH.device, non_blocking=True), delta)
