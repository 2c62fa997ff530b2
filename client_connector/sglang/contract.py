"""Every attribute of SGLang that the plugin touches; see serving.contract."""

from __future__ import annotations

from client_connector.serving.contract import Supported, Touched

SUPPORTED = Supported("SGLang", (0, 5, 23), (0, 5, 25))
_SCHEDULER = "sglang.srt.managers.scheduler"
_BATCH = "sglang.srt.managers.schedule_batch"
_TOKENIZER = "sglang.srt.managers.tokenizer_manager"
_OPENAI = "sglang.srt.entrypoints.openai"
CONTRACT = (
    # front end
    Touched("sglang", "__version__"),
    Touched(
        "sglang.srt.server_args",
        "ServerArgs",
        (
            *("enable_lora", "max_loras_per_batch", "max_loaded_loras", "max_lora_rank", "lora_target_modules"),
            *("lora_paths", "disable_overlap_schedule", "disable_cuda_graph", "pp_size", "dp_size", "ep_size"),
            *("moe_dp_size", "attn_dp_size", "attn_cp_size", "dcp_size", "dwdp_size", "moe_dense_tp_size"),
            *("moe_a2a_backend", "enable_layernorm_sp", "enable_attn_tp_input_scattered"),
            *("tokenizer_worker_num", "disaggregation_mode", "speculative_algorithm", "dllm_algorithm"),
            *("enable_mixed_chunk", "enable_pdmux", "enable_streaming_session", "enable_torch_compile"),
            *("enable_two_batch_overlap", "enable_lora_overlap_loading", "lora_drain_wait_threshold"),
            *("encoder_only", "use_ray", "smg_grpc_mode", "grpc_mode", "grpc_port", "nnodes"),
            *("cuda_graph_config", "cuda_graph_backend_decode", "cuda_graph_backend_prefill"),
            *("model_path", "served_model_name", "device", "skip_server_warmup", "api_key", "admin_api_key"),
        ),
        ("_resolution_finished",),
    ),
    Touched("sglang.srt.server_args", "ServerArgs.resolve_once", ("self",)),
    Touched("sglang.srt.environ", "envs.SGLANG_RUST_SERVER"),
    Touched("sglang.srt.environ", "envs.SGLANG_GRPC_PORT"),
    Touched("sglang.srt.lora.lora_registry", "LoRARef", ("lora_id", "lora_name", "lora_path")),
    Touched(_TOKENIZER, "LoRARegistry", ("lora_paths",)),
    *(
        Touched(_TOKENIZER, f"LoRARegistry.{name}")
        for name in ("get_unregistered_loras", "acquire", "release", "get_all_adapters", "num_registered_loras")
    ),
    Touched(_TOKENIZER, "TokenizerManager", (), ("lora_registry", "served_model_name", "model_path")),
    Touched(_TOKENIZER, "TokenizerManager._validate_and_resolve_lora", ("obj",)),
    Touched("sglang.srt.managers.io_struct", "GenerateReqInput", ("lora_id", "lora_path", "stream")),
    Touched(_TOKENIZER, "TokenizerManager.load_lora_adapter", ("obj",)),
    Touched(_TOKENIZER, "TokenizerManager.unload_lora_adapter", ("obj",)),
    Touched("sglang.srt.managers.io_struct", "LoRAUpdateOutput", ("success", "error_message", "loaded_adapters")),
    *(
        Touched(f"{_OPENAI}.serving_{module}", name)
        for module, name in (
            ("chat", "OpenAIServingChat"),
            ("completions", "OpenAIServingCompletion"),
            ("embedding", "OpenAIServingEmbedding"),
            ("tokenize", "OpenAIServingTokenize"),
            ("tokenize", "OpenAIServingDetokenize"),
        )
    ),
    Touched(f"{_OPENAI}.serving_base", "OpenAIServingBase.handle_request", ("request", "raw_request")),
    Touched(f"{_OPENAI}.serving_base", "OpenAIServingBase.create_error_response", ("message", "status_code")),
    Touched(f"{_OPENAI}.serving_responses", "OpenAIServingResponses._validate_model", ("model",)),
    Touched(f"{_OPENAI}.serving_responses", "OpenAIServingResponses.create_error_response", ("message", "param")),
    *(
        Touched("sglang.srt.entrypoints.ollama.serving", f"OllamaServing.{name}", ("request", "raw_request"))
        for name in ("handle_chat", "handle_generate")
    ),
    Touched("sglang.srt.entrypoints.http_server", "serve_generate_request", ("obj", "request")),
    Touched("sglang.srt.entrypoints.http_server", "_global_state"),
    Touched("sglang.srt.entrypoints.http_server", "app.build_middleware_stack"),
    Touched("sglang.srt.entrypoints.http_server", "_freeze_gc_after_server_warmup", ("server_args",)),
    Touched(
        f"{_OPENAI}.serving_base",
        "OpenAIServingBase._resolve_lora_path",
        ("request_model", "explicit_lora_path"),
        ("tokenizer_manager",),
    ),
    # scheduler
    Touched(
        _SCHEDULER,
        "Scheduler",
        ("server_args",),
        (
            "waiting_queue",
            "chunked_req",
            "tokenizer",
            "tp_worker",
            "batch_result_processor",
            "running_batch",
            "max_loras_per_batch",
        ),
    ),
    Touched(_SCHEDULER, "Scheduler._add_request_to_queue", ("req", "is_retracted")),
    Touched(_SCHEDULER, "Scheduler._release_aborted_request", ("req",)),
    Touched(_SCHEDULER, "Scheduler.can_schedule_lora_req", ("req", "running_loras")),
    Touched(_SCHEDULER, "Scheduler.get_next_batch_to_run", ("running_batch", "last_batch")),
    Touched(_SCHEDULER, "Scheduler.run_batch", ("batch",)),
    Touched(_SCHEDULER, "Scheduler.process_batch_result", ("batch", "result")),
    Touched(_SCHEDULER, "Scheduler.release_host_resources"),
    Touched(_SCHEDULER, "Scheduler.send_abort_output", ("abort_req", "req")),
    Touched(_SCHEDULER, "NextBatchPlan", ("running_batch", "batch_to_run")),
    Touched(_SCHEDULER, "_make_abort_req", ("req", "finished_reason")),
    Touched(
        "sglang.srt.managers.scheduler_components.batch_result_processor",
        "SchedulerBatchResultProcessor",
        ("enable_overlap",),
    ),
    Touched(
        _BATCH,
        "ScheduleBatch",
        ("reqs", "forward_mode", "extend_lens", "prefix_lens", "extend_num_tokens", "return_logprob", "batch_is_full"),
    ),
    Touched("sglang.srt.model_executor.forward_batch_info", "ForwardMode.is_extend"),
    Touched("sglang.srt.model_executor.forward_batch_info", "ForwardBatch", ("rids", "lora_ids")),
    Touched("sglang.srt.managers.tp_worker", "TpModelWorker.model_runner"),
    Touched(_BATCH, "ScheduleBatch.release_req", ("idx", "remaing_req_count")),
    Touched(_BATCH, "ScheduleBatch.filter_batch", ("reqs_to_exclude",)),
    Touched(
        _BATCH,
        "Req",
        ("rid", "lora_id", "extra_key", "origin_input_ids"),
        (
            *("rid", "lora_id", "extra_key", "origin_input_ids", "output_ids", "to_finish", "is_retracted"),
            "skip_radix_cache_insert",
        ),
    ),
    Touched(_BATCH, "Req.finished"),
    # worker
    Touched(
        "sglang.srt.model_executor.model_runner",
        "LoRAManager",
        ("base_model", "base_hf_config", "server_args"),
        ("attn_dp_enabled",),
    ),
    *(
        Touched("sglang.srt.model_executor.model_runner", f"LoRAManager.{name}")
        for name in (
            *("prepare_lora_batch", "reset_lora_batch", "fetch_new_loras", "reset_routing_cache"),
            *("validate_lora_batch", "can_use_prefill_cuda_graph", "load_lora_adapter", "unload_lora_adapter"),
            "load_lora_adapter_from_tensors",
        )
    ),
    Touched("sglang.srt.model_executor.model_runner", "ModelRunner", (), ("lora_manager",)),
    Touched("sglang.srt.layers.linear", "LinearBase", (), ("quant_method", "input_size", "output_size")),
    Touched("sglang.srt.layers.linear", "ColumnParallelLinear", (), ("tp_group", "output_size_per_partition")),
    Touched("sglang.srt.layers.linear", "RowParallelLinear", (), ("tp_group", "input_size_per_partition")),
    Touched("sglang.srt.layers.linear", "QKVParallelLinear", (), ("num_kv_head_replicas",)),
    Touched("sglang.srt.distributed.utils", "get_group_rank_size", ("group",)),
    Touched("sglang.srt.runtime_context", "get_parallel"),
    Touched("sglang.srt.layers.quantization.unquant", "UnquantizedLinearMethod.apply", ("layer", "x", "bias")),
    Touched(
        "sglang.srt.layers.moe.fused_moe_triton.layer",
        "FusedMoE",
        (),
        ("moe_runner_config", "moe_ep_size", "moe_tp_size", "moe_tp_rank"),
    ),
    Touched(
        "sglang.srt.layers.moe.fused_moe_native",
        "moe_forward_native",
        ("layer", "x", "topk_output", "moe_runner_config"),
    ),
)
