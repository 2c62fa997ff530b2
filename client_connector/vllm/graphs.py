"""Splits vLLM's captured graphs at the exchanges of the host; launches of kernels need no split."""

from __future__ import annotations

from typing import Any

from client_connector.serving.linear import NAMES


def split_graphs(compilation_config: Any) -> Any:
    """Change vLLM's CompilationConfig so that no captured piece contains an exchange."""
    if compilation_config.splitting_ops is None:
        compilation_config.splitting_ops = list(compilation_config._attention_ops)
    wanted = [*NAMES, "vllm::moe_forward", "vllm::moe_forward_shared"]
    compilation_config.splitting_ops += [op for op in wanted if op not in compilation_config.splitting_ops]
    return compilation_config
