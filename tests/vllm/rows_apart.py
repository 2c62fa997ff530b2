"""A vLLM engine on this CPU that computes every row by itself, so that no bit of it depends on the rows beside it.

A batch's shape decides how a GEMM, an expert's group and attention round. Requests that start over, or whose neighbours
do, are in batches of other shapes than those of an undisturbed run; of engines like this one both give the same bits.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from vllm.model_executor.layers import utils
from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder

from client_connector.vllm.hooks import moe

SWITCH = "LORA_SERVER_TEST_ROWS_APART"


def use() -> None:
    """Before the engine is made."""
    utils.cpu_unquantized_gemm = _linear(utils.cpu_unquantized_gemm)
    moe.RemoteCPUExperts.process_weights_after_loading = lambda experts, layer: None  # its kernel takes whole batches
    moe._grouped = _grouped(moe._grouped)
    CPUAttentionMetadataBuilder.build = _attention(CPUAttentionMetadataBuilder.build)


def _by_row(gemm: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Each row in memory of its own, which is aligned alike."""
    rows = x.reshape(-1, x.shape[-1])
    return torch.cat([gemm(row[None].clone()) for row in rows]).view(*x.shape[:-1], -1)


def _linear(original: Any) -> Any:
    return lambda layer, x, weight, bias: _by_row(lambda row: original(layer, row, weight, bias), x)


def _grouped(original: Any) -> Any:
    def grouped(linear: Any, *rest: Any) -> None:
        original(lambda x, weight, bias: _by_row(lambda row: linear(row, weight, bias), x), *rest)

    return grouped


def _attention(original: Any) -> Any:
    """Each token as a request that decodes; all keys are in the cache by then."""

    def build(self: Any, common_prefix_len: int, common: Any, *args: Any, **kwargs: Any) -> Any:
        counts = common.query_start_loc.diff()[: common.num_reqs]
        ends = common.seq_lens[: common.num_reqs]
        lengths = [torch.arange(end - count + 1, end + 1) for count, end in zip(counts, ends, strict=True)]
        alone = dataclasses.replace(
            common,
            num_reqs=common.num_actual_tokens,
            query_start_loc=torch.arange(common.num_actual_tokens + 1, dtype=common.query_start_loc.dtype),
            seq_lens=torch.cat(lengths).to(common.seq_lens.dtype),
            max_query_len=1,
            block_table_tensor=common.block_table_tensor[: common.num_reqs].repeat_interleave(counts, 0),
        )
        return original(self, common_prefix_len, alone, *args, **kwargs)

    return build
