"""Hooks of the expert sites: vLLM's LoRA-aware experts with a remote wrapper, and experts for the CPU.

vLLM has no LoRA for MoE on CPUs (it picks Triton experts), so we give it an experts class that
exchanges around its GEMMs. Shapes: T tokens, k experts, N = T * k entries.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional
from vllm._custom_ops import cpu_prepack_moe_weight
from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as unquantized
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.experts.lora_context import MoELoRAContext
from vllm.model_executor.layers.fused_moe.experts.lora_experts_mixin import LoRAExpertsMixin
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.platforms import current_platform

from client_connector.serving.planned import PlannedPass
from client_connector.serving.wrapping import Wrap
from client_connector.vllm.punica import RemotePunica
from client_connector.vllm.settings import of_engine
from lora_server.errors import ConfigError

PACKED_ROWS = 16
SWIGLU_LIMIT, SWIGLU_ALPHA = 7.0, 1.702  # of GPT-OSS, as vLLM's own kernel has them


class RemoteCPUExperts(LoRAExpertsMixin, CPUUnquantizedExperts):
    """Unquantized experts on a CPU that overlap their GEMMs with the server's.

    Weights are packed for vLLM's own kernel, which serves the steps without adapter rows, wherever
    we can also read that packing; otherwise they stay [E, out, in] and are never given to it.
    """

    packed = False

    def process_weights_after_loading(self, layer: Any) -> None:
        """Pack, as vLLM does, where the kernel takes the shapes and `_unpacked` finds the weights again."""
        before = layer.w13_weight[0].clone()
        if not self._supports_grouped_gemm(self.moe_config)[0] or not _is_readable(before, self.isa):
            return
        super().process_weights_after_loading(layer)
        self.packed = not self._use_zentorch

    def apply(
        self,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        activation: Any,
        global_num_experts: int,
        expert_map: torch.Tensor | None,
        a1q_scale: torch.Tensor | None,
        a2_scale: torch.Tensor | None,
        workspace13: torch.Tensor,
        workspace2: torch.Tensor,
        expert_tokens_meta: Any,
        apply_router_weight_on_input: bool,
    ) -> None:
        """Push, own GEMM, wait, add; twice. Fills `output` [T, H]."""
        context = self._lora_context
        remote: Any = None if context is None else context.punica_wrapper
        if self.packed and expert_map is None and not (remote and remote.forward.sites.active):
            arguments = (a1q_scale, a2_scale, workspace13, workspace2, expert_tokens_meta)
            rows = (output, hidden_states, w1, w2, topk_weights, topk_ids, activation)
            super().apply(*rows, global_num_experts, expert_map, *arguments, apply_router_weight_on_input)
            return
        linear = _linear_packed if self.packed else functional.linear
        top_k = topk_ids.shape[1]
        order, counts = _by_expert(topk_ids, expert_map, w1.shape[0])

        pending = remote.start_gate_up(hidden_states, topk_ids, expert_map) if remote else None
        hidden_NO = hidden_states.new_zeros(topk_ids.numel(), w1.shape[1])
        _grouped(linear, hidden_NO, hidden_states, order, counts, top_k, w1, self.w1_bias)
        if pending is not None:
            remote.finish_gate_up(pending, hidden_NO, activation == MoEActivation.SWIGLUOAI)
        act_NI = _activate(activation, hidden_NO)

        pending = remote.start_down(act_NI, topk_ids, topk_weights, expert_map) if remote else None
        out_NH = act_NI.new_zeros(topk_ids.numel(), w2.shape[1])
        _grouped(linear, out_NH, act_NI, order, counts, 1, w2, self.w2_bias)
        if not apply_router_weight_on_input:
            out_NH = out_NH * topk_weights.reshape(-1, 1).to(out_NH.dtype)
        output.copy_(out_NH.view(*topk_ids.shape, -1).sum(1))
        if pending is not None:
            remote.finish_down(pending, output)


def _by_expert(ids_Tk: torch.Tensor, expert_map: torch.Tensor | None, experts: int) -> tuple[torch.Tensor, list[int]]:
    """Sort entries by this rank's expert and count those of each; entries of other ranks are left out."""
    flat = ids_Tk.reshape(-1).long()
    local = flat if expert_map is None else expert_map.long()[flat]
    local = torch.where(local < 0, experts, local)
    counts = torch.bincount(local, minlength=experts + 1)[:experts].tolist()
    return torch.argsort(local, stable=True), counts


def _blocks(weight_OK: torch.Tensor) -> torch.Tensor:
    """Pack one expert as vLLM's portable kernel does: [O / 16, K, 16]."""
    return weight_OK.view(weight_OK.shape[0] // PACKED_ROWS, weight_OK.shape[1], PACKED_ROWS)


def _is_readable(weight_OK: torch.Tensor, isa: str) -> bool:
    """Tell whether this vLLM packs weights of this dtype for this processor as `_blocks` does."""
    if weight_OK.shape[0] % (2 * PACKED_ROWS):
        return False
    packed = cpu_prepack_moe_weight(weight_OK[None].contiguous(), isa)[0]
    return torch.equal(_blocks(packed).transpose(1, 2).reshape(weight_OK.shape), weight_OK)


def _linear_packed(x_NK: torch.Tensor, weight_OK: torch.Tensor, bias_O: torch.Tensor | None) -> torch.Tensor:
    out_NO = torch.matmul(x_NK, _blocks(weight_OK)).transpose(0, 1).reshape(x_NK.shape[0], -1)
    return out_NO if bias_O is None else out_NO + bias_O


def _grouped(
    linear: Callable[..., torch.Tensor],
    out_NO: torch.Tensor,
    x_RK: torch.Tensor,
    order_N: torch.Tensor,
    counts: list[int],
    entries_per_row: int,
    weight_EOK: torch.Tensor,
    bias_EO: torch.Tensor | None,
) -> None:
    """Multiply each entry by its expert's weight; entry i reads row i // entries_per_row of x."""
    first = 0
    for expert, count in enumerate(counts):
        if count:
            entries = order_N[first : first + count]
            bias = None if bias_EO is None else bias_EO[expert]
            out_NO[entries] = linear(x_RK[entries // entries_per_row], weight_EOK[expert], bias)
            first += count


def _activate(activation: Any, hidden_NO: torch.Tensor) -> torch.Tensor:
    if activation == MoEActivation.SWIGLUOAI:
        gate = hidden_NO[:, 0::2].clamp(max=SWIGLU_LIMIT)
        up = hidden_NO[:, 1::2].clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
        return (up + 1) * gate * torch.sigmoid(gate * SWIGLU_ALPHA)
    gate, up = hidden_NO.chunk(2, dim=1)
    return functional.silu(gate) * up


def install(wrap: Wrap) -> None:
    """Give CPU engines experts that know LoRA."""
    wrap(unquantized, "select_unquantized_moe_backend", _select)


def _select(original: Any) -> Callable[..., Any]:
    def select_unquantized_moe_backend(moe_config: Any) -> Any:
        if not (current_platform.is_cpu() and moe_config.is_lora_enabled and _ours()):
            return original(moe_config)
        if moe_config.activation not in (MoEActivation.SILU, MoEActivation.SWIGLUOAI):
            raise ConfigError(f"experts: got activation {moe_config.activation}, expected silu or swigluoai")
        return UnquantizedMoeBackend.CPU, RemoteCPUExperts

    return select_unquantized_moe_backend


def _ours() -> bool:
    from vllm.config import get_current_vllm_config

    return of_engine(get_current_vllm_config()) is not None


def attach_experts(runner: Any, forward: PlannedPass, layer: int) -> None:
    """Put a remote wrapper where vLLM's LoRA layers put Punica's."""
    experts, config = runner.routed_experts, runner.moe_config
    kernel = getattr(experts.quant_method, "moe_kernel", None)
    fused = getattr(kernel, "fused_experts", None)
    if not isinstance(fused, LoRAExpertsMixin):
        raise ConfigError(
            f"layer {layer}: vLLM's {type(fused or experts.quant_method).__name__} does not support LoRA; "
            "use an unquantized model, or a quantization whose experts do"
        )
    remote = remote_experts(config, forward, layer, bool(experts.apply_router_weight_on_input))
    fused.set_lora_context(_context(config, remote))


def remote_experts(config: Any, forward: PlannedPass, layer: int, weighted_input: bool) -> RemotePunica:
    """Make one rank's exchanges: their windows are its ffn columns, unless the ranks divide the experts instead."""
    ffn = forward.client.terms.spec.ffn_at(layer)
    rank, size = config.moe_parallel_config.tp_rank, config.intermediate_size_per_partition_unpadded
    begin, end = min(rank * size, ffn), min((rank + 1) * size, ffn)
    if begin == end:
        raise ConfigError(f"layer {layer}: tensor-parallel rank {rank} has no columns of its experts; use fewer ranks")
    return RemotePunica.of_columns(forward, layer, begin, end, weighted_input)


def _context(config: Any, remote: RemotePunica) -> Any:
    """Make a LoRA context without weights; on CUDA its second stream lets vLLM run our exchange beside its GEMM."""
    cuda = current_platform.is_cuda_alike()
    return MoELoRAContext(
        w13_lora_a_stacked=(),
        w13_lora_b_stacked=(),
        w2_lora_a_stacked=(),
        w2_lora_b_stacked=(),
        adapter_enabled=torch.empty(0, dtype=torch.int32),
        max_loras=0,
        top_k=config.experts_per_token,
        w13_num_slices=2,
        fully_sharded=False,
        tp_rank=config.moe_parallel_config.tp_rank,
        tp_size=config.moe_parallel_config.tp_size,
        local_num_experts=config.num_local_experts,
        punica_wrapper=remote,
        use_tuned_config=False,
        aux_stream=torch.cuda.Stream() if cuda else None,
        events=tuple(torch.cuda.Event() for _ in range(4)) if cuda else None,
    )
