"""Where vLLM's captured graphs are cut, unless kernels send and wait: otherwise an exchange happens on the host."""

from __future__ import annotations

from typing import Any

from client_connector.serving.linear import NAMES


def split_graphs(compilation_config: Any) -> Any:
    """Changes vLLM's CompilationConfig so that no piece holds an exchange."""
    if compilation_config.splitting_ops is None:
        compilation_config.splitting_ops = list(compilation_config._attention_ops)
    wanted = [*NAMES, "vllm::moe_forward", "vllm::moe_forward_shared"]
    compilation_config.splitting_ops += [op for op in wanted if op not in compilation_config.splitting_ops]
    return compilation_config
