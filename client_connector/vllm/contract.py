"""Every attribute of vLLM that the plugin touches. Checked when it is installed, and by a test.

An upgrade that moves one is refused by name, before an engine starts.
"""

from __future__ import annotations

import importlib
import inspect
import re
from typing import Any, NamedTuple

from client_connector.vllm.version import SUPPORTED
from lora_server.errors import ConfigError


class Touched(NamedTuple):
    """A module's attribute, such as Class.method; `parameters` that we pass or read by name."""

    module: str
    name: str
    parameters: tuple[str, ...] = ()
    instance: tuple[str, ...] = ()  # attributes that the class gives its instances, and we use


_MOE = "vllm.model_executor.layers.fused_moe"
CONTRACT = (
    # front end
    Touched("vllm", "__version__"),
    Touched(
        "vllm.engine.arg_utils",
        "EngineArgs",
        (
            *("additional_config", "enable_lora", "max_loras", "enforce_eager", "compilation_config"),
            *("model", "served_model_name"),
        ),
    ),
    Touched("vllm.engine.arg_utils", "EngineArgs.create_engine_config", ("self",)),
    Touched("vllm.config", "CompilationConfig._attention_ops"),
    Touched("vllm.config", "CUDAGraphMode.PIECEWISE"),
    Touched("vllm.config", "CompilationConfig", ("splitting_ops", "cudagraph_mode")),
    Touched("vllm.v1.engine.async_llm", "AsyncLLM.generate", ("self", "request_id"), ("vllm_config",)),
    Touched(
        "vllm.entrypoints.openai.models.serving",
        "OpenAIServingModels",
        ("engine_client",),
        ("lora_requests", "lora_id_counter", "engine_client"),
    ),
    Touched("vllm.entrypoints.openai.models.serving", "OpenAIServingModels.is_base_model", ("model_name",)),
    Touched("vllm.entrypoints.openai.models.serving", "OpenAIServingModels.load_lora_adapter", ("request",)),
    Touched("vllm.entrypoints.openai.models.serving", "OpenAIServingModels.unload_lora_adapter", ("request",)),
    Touched("vllm.entrypoints.openai.models.serving", "OpenAIServingModels._check_load_lora_adapter_request"),
    Touched("vllm.entrypoints.openai.models.serving", "OpenAIServingModels.show_available_models"),
    Touched("vllm.entrypoints.openai.models.serving", "OpenAIServingModels.model_name", ("lora_request",)),
    Touched("vllm.entrypoints.serve.engine.serving", "BaseServing._check_model", ("request",), ("models",)),
    Touched("vllm.entrypoints.serve.engine.serving", "BaseServing._is_model_supported", ("model_name",)),
    Touched("vllm.entrypoints.serve", "create_error_response", ("message", "err_type", "status_code", "param")),
    Touched("vllm.entrypoints.serve.engine.protocol", "ModelCard"),
    Touched("vllm.entrypoints.serve.engine.protocol", "ErrorResponse"),
    Touched("fastapi", "FastAPI.build_middleware_stack"),
    Touched("vllm.exceptions", "GenerationError", ("message",)),
    Touched("vllm.exceptions", "RetryableRequestError", ("message",)),
    Touched("vllm.exceptions", "VLLMNotFoundError"),
    Touched("vllm.lora.request", "LoRARequest", ("lora_name", "lora_int_id", "lora_path")),
    # engine core
    Touched("vllm.v1.engine.core", "EngineCore.preprocess_add_request", ("request",), ("scheduler",)),
    Touched("vllm.v1.core.kv_cache_utils", "generate_block_hash_extra_keys", ("request", "end_token_idx")),
    Touched(
        "vllm.v1.core.sched.scheduler",
        "Scheduler",
        ("vllm_config",),
        ("requests", "running", "waiting", "kv_cache_manager"),
    ),
    Touched("vllm.v1.core.sched.scheduler", "Scheduler.schedule", ("self",)),
    Touched("vllm.v1.core.sched.scheduler", "Scheduler.update_from_output", ("scheduler_output",)),
    Touched("vllm.v1.core.sched.scheduler", "Scheduler.finish_requests", ("request_ids", "finished_status")),
    Touched("vllm.v1.core.sched.scheduler", "Scheduler._handle_blocked_waiting_request", ("request",)),
    Touched("vllm.v1.core.sched.scheduler", "Scheduler._free_request", ("request",)),
    Touched("vllm.v1.core.sched.scheduler", "Scheduler._preempt_request", ("request", "drop_stale_output")),
    Touched("vllm.v1.core.sched.scheduler", "Scheduler.shutdown"),
    Touched("vllm.v1.core.sched.output", "SchedulerOutput", ("num_scheduled_tokens",)),
    Touched("vllm.v1.core.kv_cache_manager", "KVCacheManager.get_block_ids", ("request_id",)),
    Touched("vllm.v1.core.kv_cache_manager", "KVCacheManager.evict_blocks", ("block_ids",)),
    Touched(
        "vllm.v1.request",
        "Request",
        ("request_id", "lora_request"),
        ("prompt_token_ids", "block_hashes", "client_index", "request_id", "lora_request", "trace_headers"),
    ),
    Touched("vllm.v1.request", "Request.update_block_hashes"),
    Touched("vllm.v1.engine", "EngineCoreRequest", ("trace_headers",)),
    Touched("vllm.tokenizers", "get_tokenizer"),
    Touched(
        "vllm.config",
        "ModelConfig",
        ("dtype", "tokenizer", "tokenizer_mode", "tokenizer_revision", "trust_remote_code"),
    ),
    Touched("vllm.config", "get_current_vllm_config"),
    Touched("vllm.v1.request", "RequestStatus.FINISHED_ERROR"),
    Touched("vllm.v1.request", "RequestStatus.RUNNING"),
    Touched("vllm.v1.engine", "EngineCoreOutput", ("request_id", "new_token_ids", "finish_reason", "stop_reason")),
    Touched("vllm.v1.engine", "EngineCoreOutput.kv_transfer_params"),
    Touched("vllm.v1.engine", "EngineCoreOutputs", ("outputs",)),
    Touched("vllm.v1.engine", "FinishReason.ERROR"),
    # worker
    Touched("vllm.v1.worker.lora_model_runner_mixin", "LRUCacheWorkerLoRAManager", ("vllm_config", "device")),
    Touched(
        "vllm.v1.worker.lora_model_runner_mixin",
        "LoRAModelRunnerMixin.set_active_loras",
        ("input_batch", "num_scheduled_tokens"),
    ),
    Touched("vllm.v1.worker.lora_model_runner_mixin", "LoRAModelRunnerMixin.maybe_setup_dummy_loras", ("lora_config",)),
    Touched(
        "vllm.v1.worker.lora_model_runner_mixin",
        "LoRAModelRunnerMixin.maybe_select_dummy_loras",
        ("self", "num_active_loras"),
    ),
    Touched("vllm.config", "SchedulerConfig", ("max_num_batched_tokens", "max_num_seqs")),
    Touched("vllm.v1.worker.gpu_model_runner", "GPUModelRunner.execute_model", ("scheduler_output",), ("input_batch",)),
    Touched("vllm.v1.worker.gpu_model_runner", "GPUModelRunner.sample_tokens"),
    Touched("vllm.v1.worker.gpu_model_runner", "GPUModelRunner.shutdown"),
    Touched("vllm.v1.worker.gpu_model_runner", "AsyncGPUModelRunnerOutput", (), ("_model_runner_output",)),
    Touched("vllm.v1.worker.gpu_input_batch", "InputBatch.req_ids", (), ("num_computed_tokens_cpu",)),
    Touched("vllm.v1.outputs", "ModelRunnerOutput", ("req_ids",)),
    Touched("vllm.model_executor.layers.linear", "LinearBase", (), ("quant_method", "tp_rank", "tp_size")),
    Touched("vllm.model_executor.layers.linear", "QKVParallelLinear", (), ("num_kv_head_replicas",)),
    Touched("vllm.model_executor.layers.linear", "UnquantizedLinearMethod.apply", ("layer", "x", "bias")),
    Touched("vllm.distributed", "get_tp_group"),
    Touched("vllm.distributed.parallel_state", "GroupCoordinator", (), ("cpu_group", "world_size", "rank_in_group")),
    # experts
    Touched(_MOE, "MoERunner", (), ("routed_experts", "moe_config")),
    Touched(f"{_MOE}.routed_experts", "RoutedExperts", (), ("quant_method", "apply_router_weight_on_input")),
    Touched(f"{_MOE}.fused_moe_method_base", "FusedMoEMethodBase", (), ("moe_kernel",)),
    Touched(f"{_MOE}.modular_kernel", "FusedMoEKernel", ("fused_experts",), ("fused_experts",)),
    Touched(f"{_MOE}.config", "FusedMoEConfig.is_lora_enabled"),
    Touched(
        f"{_MOE}.config",
        "FusedMoEConfig",
        ("moe_parallel_config", "intermediate_size_per_partition_unpadded", "experts_per_token", "num_local_experts"),
    ),
    Touched(f"{_MOE}.config", "FusedMoEParallelConfig", ("tp_size", "tp_rank", "dp_size", "use_ep")),
    Touched(f"{_MOE}.experts.lora_context", "MoELoRAContext", ("punica_wrapper", "aux_stream", "events", "top_k")),
    Touched(
        f"{_MOE}.experts.lora_experts_mixin", "LoRAExpertsMixin.apply_w13_lora", ("y", "x", "topk_ids", "expert_map")
    ),
    Touched(f"{_MOE}.experts.lora_experts_mixin", "LoRAExpertsMixin.apply_w2_lora", ("y", "x", "topk_weights")),
    Touched(f"{_MOE}.experts.lora_experts_mixin", "LoRAExpertsMixin.set_lora_context", ("ctx",)),
    Touched(f"{_MOE}.experts.cpu_moe", "CPUUnquantizedExperts.apply", ("output", "topk_ids", "expert_map")),
    Touched("vllm._custom_ops", "cpu_prepack_moe_weight", ("weight", "isa")),
    Touched(f"{_MOE}.experts.cpu_moe", "CPUUnquantizedExperts.isa", (), ("_use_zentorch",)),
    Touched(f"{_MOE}.experts.cpu_moe", "CPUUnquantizedExperts._supports_grouped_gemm", ("moe_config",)),
    Touched(f"{_MOE}.experts.cpu_moe", "CPUUnquantizedExperts.process_weights_after_loading", ("layer",)),
    Touched(f"{_MOE}.activation", "MoEActivation.SILU"),
    Touched(f"{_MOE}.activation", "MoEActivation.SWIGLUOAI"),
    Touched(f"{_MOE}.oracle.unquantized", "UnquantizedMoeBackend.CPU"),
    Touched(f"{_MOE}.unquantized_fused_moe_method", "select_unquantized_moe_backend", ("moe_config",)),
    Touched("vllm.platforms", "current_platform.is_cpu"),
    Touched("vllm.lora.punica_wrapper.punica_gpu", "PunicaWrapperGPU.add_lora_w13", ("y", "x", "topk_ids")),
    Touched("vllm.lora.punica_wrapper.punica_gpu", "PunicaWrapperGPU.add_lora_w2", ("y", "x", "topk_weights")),
)


def problems() -> list[str]:
    """List the parts of the contract that the installed vLLM breaks, by name."""
    return [problem for touched in CONTRACT for problem in _problems(touched)]


def check(version: str) -> None:
    """Raise ConfigError that names everything that is missing."""
    broken = problems()
    if broken:
        raise ConfigError(
            f"vLLM {version}: {'; '.join(broken)}; the plugin was made for {SUPPORTED}: install such a version, "
            "or unset LORA_SERVER_ADDRESS"
        )


def _problems(touched: Touched) -> list[str]:
    where = f"{touched.module}.{touched.name}"
    try:
        found: Any = importlib.import_module(touched.module)
        owner = found
        for part in touched.name.split("."):
            owner, found = found, _attribute(found, part)
    except (ImportError, AttributeError) as error:
        return [f"{where} is gone ({error})"]
    wrong = []
    if touched.parameters:
        missing = set(touched.parameters) - set(inspect.signature(found).parameters)
        wrong += [f"{where} has no parameter {name}" for name in sorted(missing)]
    given = found if inspect.isclass(found) else owner
    return wrong + [f"{where}: instances have no {name}" for name in touched.instance if not _gives(given, name)]


def _attribute(found: Any, name: str) -> Any:
    """Return an attribute; None for a field that a class only annotates. Raises AttributeError."""
    classes = found.__mro__ if inspect.isclass(found) else ()
    if not hasattr(found, name) and any(name in vars(one).get("__annotations__", {}) for one in classes):
        return None
    return getattr(found, name)


def _gives(owner: Any, name: str) -> bool:
    """Tell whether a class has an attribute, or sets it on `self` in some method."""
    sets = re.compile(rf"self\.{name}\b[^=\n]*=")
    return any(
        name in vars(base) or name in vars(base).get("__annotations__", {}) or sets.search(_source(base))
        for base in owner.__mro__[:-1]
    )


def _source(owner: Any) -> str:
    try:
        return inspect.getsource(owner)
    except (OSError, TypeError):
        return ""
