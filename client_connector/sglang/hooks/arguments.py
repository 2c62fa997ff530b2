"""Hooks of the engine's arguments: what is refused, what is set, and a server that answers before workers start."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from sglang.srt.environ import envs
from sglang.srt.server_args import ServerArgs

from client_connector.serving.lookup import require_server
from client_connector.serving.settings import ERROR, Settings, find
from client_connector.serving.wrapping import Wrap, end_with_one_line
from client_connector.sglang.tenants import TENANTS, has_tenants
from lora_server.errors import ConfigError, LoraServerError
from lora_server.merged import find_merged

MAX_ADAPTERS = 1 << 20  # of one batch; nothing is allocated for them
# with any other value rows get wrong deltas, or none in silence; None is SGLang's default
ONLY: dict[str, Any] = {
    "pp_size": 1,
    "dp_size": 1,
    "nnodes": 1,
    "ep_size": 1,
    "moe_dp_size": 1,
    "attn_dp_size": 1,
    "attn_cp_size": 1,
    "dcp_size": 1,
    "dwdp_size": 1,
    "moe_dense_tp_size": None,
    "moe_a2a_backend": "none",
    "enable_layernorm_sp": False,
    "enable_attn_tp_input_scattered": False,
    "tokenizer_worker_num": 1,
    "disaggregation_mode": "null",
    "speculative_algorithm": None,
    "dllm_algorithm": None,
    "enable_mixed_chunk": False,
    "enable_pdmux": False,
    "encoder_only": False,
    "use_ray": False,
    "smg_grpc_mode": False,
    "grpc_mode": False,
    "enable_streaming_session": False,
    "enable_torch_compile": False,
    "enable_two_batch_overlap": False,
    "enable_lora_overlap_loading": None,
    "cuda_graph_config": None,
    "cuda_graph_backend_decode": None,
    "cuda_graph_backend_prefill": None,
    "lora_drain_wait_threshold": 0.0,
    "lora_paths": None,
}


def install(wrap: Wrap) -> None:
    """Wrap `resolve_once`: all arguments are set by then, and none has been used."""
    wrap(ServerArgs, "resolve_once", _resolve_once)


def _resolve_once(original: Any) -> Callable[..., None]:
    def resolve_once(self: Any) -> None:
        if not getattr(self, "_resolution_finished", False):
            try:
                found = find(None, os.environ)
                assert found is not None  # the plugin is installed
                _check(self, found)
                require_server(found)
                _configure(self)
            except LoraServerError as error:
                end_with_one_line(error)
                raise
        original(self)

    return resolve_once


def _check(args: Any, found: Settings) -> None:
    """Raise ConfigError, by name, for what is not supported."""
    keys = [name for name in ("api_key", "admin_api_key") if getattr(args, name)] if has_tenants(os.environ) else []
    if keys:
        raise ConfigError(
            f"{keys[0]}: got one with {TENANTS}, expected none: callers show their token where it would be"
        )
    ports = {"grpc_port": args.grpc_port, "SGLANG_GRPC_PORT": envs.SGLANG_GRPC_PORT.get()}  # 0 is one, too
    others = {
        "on_failure": (found.on_failure, ERROR),
        "transport gpu or nvshmem": (found.is_launched, False),
        "SGLANG_RUST_SERVER": (bool(envs.SGLANG_RUST_SERVER.get()), False),
        **{name: (None if port is None else str(port), None) for name, port in ports.items()},
        "an adapter merged into the weights": (find_merged(args.model_path) is not None, False),
    }
    for name, (got, expected) in ({name: (getattr(args, name), one) for name, one in ONLY.items()} | others).items():
        if got != expected and (got or expected):
            raise ConfigError(f"{name}: got {got}, expected {expected}; not supported with the LoRA server yet")


def _configure(args: Any) -> None:
    """Enable LoRA without a limit. A host carries the rows of each site, so each step ends before the next begins."""
    args.enable_lora, args.max_loras_per_batch, args.max_loaded_loras = True, MAX_ADAPTERS, None
    args.max_lora_rank, args.lora_target_modules = 1, ["all"]  # of weights that are never allocated
    args.disable_overlap_schedule = args.disable_cuda_graph = True
    if has_tenants(os.environ):
        args.skip_server_warmup = True  # its requests show no token
