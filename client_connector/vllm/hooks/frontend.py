"""Hooks of the front end: configuration of an engine, names resolved on the server, errors as answers."""

from __future__ import annotations

import asyncio
import dataclasses
import os
from collections.abc import AsyncIterator, Callable
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from prometheus_client import Counter, Histogram
from vllm.config import CUDAGraphMode
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.serve import create_error_response
from vllm.entrypoints.serve.engine.protocol import ModelCard
from vllm.entrypoints.serve.engine.serving import BaseServing
from vllm.exceptions import GenerationError, RetryableRequestError, VLLMNotFoundError
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform
from vllm.v1.engine.async_llm import AsyncLLM

from client_connector.directory import as_uri
from client_connector.serving.http import AsgiApp, answer_to, status_of, with_retry_after
from client_connector.serving.lookup import Lookup
from client_connector.serving.plan import Failure, parse_flag
from client_connector.serving.settings import BASE_MODEL, ERROR, KEY, Settings, tenant_and_name
from client_connector.serving.tenants import CALLER, add_as_caller, callers_tenant, remove_as_caller
from client_connector.serving.wrapping import Wrap, ours
from client_connector.vllm.graphs import split_graphs
from client_connector.vllm.settings import of_engine
from lora_server.errors import (
    ConfigError,
    LoraServerError,
    PermissionDeniedError,
    ServerUnavailableError,
    UnknownAdapterError,
)
from lora_server.merged import find_merged

# at vLLM's /metrics; outcome: error, base_model (a step failed), not_invoked (an activated LoRA)
REQUESTS = Counter("lora_server_requests", "Requests that did not get their adapter's answer", ["outcome"])
NAME_SECONDS = Histogram("lora_server_name_seconds", "Time that looking up the adapter's name of a request took")
MANY = 1 << 20  # of adapters in one batch; nothing is allocated for them
LOOKUP = f"{KEY}_lookup"  # attribute of an OpenAIServingModels of ours


def install(wrap: Wrap) -> None:
    """Wrap the model list, the check of a request's model, and the answers."""
    wrap(OpenAIServingModels, "__init__", _init)
    wrap(OpenAIServingModels, "load_lora_adapter", _load)
    wrap(OpenAIServingModels, "unload_lora_adapter", _unload)
    wrap(OpenAIServingModels, "show_available_models", _show)
    wrap(OpenAIServingModels, "model_name", _model_name)
    wrap(BaseServing, "_check_model", _check_model)
    wrap(AsyncLLM, "generate", _generate)
    wrap(FastAPI, "build_middleware_stack", _stacked)


# -- configuration


def configure(args: Any, found: Settings) -> None:
    """Enable LoRA without a limit, in the model runner that we support; store the settings in the engine's config."""
    _check_merged(args.model, found)
    args.enable_lora = True
    args.max_loras = MANY
    args.max_cpu_loras = None
    found = dataclasses.replace(found, served_names=served_names(args))
    args.additional_config = {**(args.additional_config or {}), KEY: found.as_config()}
    os.environ["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"  # /v1/load_lora_adapter and names of the server
    if os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0") not in ("0", ""):
        raise ConfigError("VLLM_USE_V2_MODEL_RUNNER: got 1, expected 0; vLLM's second model runner is not supported")
    if current_platform.is_cuda_alike() and not args.enforce_eager and not found.is_launched:
        split_graphs(args.compilation_config).cudagraph_mode = CUDAGraphMode.PIECEWISE


def _check_merged(model: str, found: Settings) -> None:
    """Raise ConfigError for settings that cannot be with an adapter merged into the weights."""
    record = find_merged(model)
    if record is not None and found.on_failure == BASE_MODEL:
        raise ConfigError(
            f"on_failure: got {BASE_MODEL} with weights that contain {record.name}, expected {ERROR}: rows of the base "
            "model need the server, too"
        )


def served_names(args: Any) -> tuple[str, ...]:
    """Return the names of the base model."""
    names = args.served_model_name or args.model
    return (names,) if isinstance(names, str) else tuple(names)


def check_parallel(vllm_config: Any) -> None:
    """Raises ConfigError for kinds of parallelism in which rows would go wrong."""
    parallel = vllm_config.parallel_config
    for name, got in (
        ("pipeline_parallel_size", parallel.pipeline_parallel_size),
        ("data_parallel_size", parallel.data_parallel_size if parallel.enable_expert_parallel else 1),
        ("decode_context_parallel_size", getattr(parallel, "decode_context_parallel_size", 1)),
    ):
        if got != 1:
            raise ConfigError(f"{name}: got {got}, expected 1; not supported with the LoRA server yet")


# -- names


def _init(original: Any) -> Callable[..., Any]:
    def init(self: Any, engine_client: Any, *args: Any, **kwargs: Any) -> None:
        original(self, engine_client, *args, **kwargs)
        found = of_engine(getattr(engine_client, "vllm_config", None))
        if found is not None:
            setattr(self, LOOKUP, Lookup.of(found))
            self.lora_server_added = set()  # names that this engine's API brought to the server
            record = find_merged(engine_client.vllm_config.model_config.model)
            if record is not None:
                _listed(self, record.name, record.version)  # it is answered also if the server was never seen

    return init


def _refusal(error: LoraServerError) -> Any:
    """Turn an error of ours into vLLM's answer."""
    status, kind = answer_to(error)
    return create_error_response(str(error), kind, status, "model")


def _listed(models: Any, name: str, version: str) -> Any:
    """List an adapter with vLLM, under the same id as long as the engine knows the name."""
    known = models.lora_requests.get(name)
    number = known.lora_int_id if known is not None else models.lora_id_counter.inc(1)
    models.lora_requests[name] = LoRARequest(name, number, f"{KEY}:{name}@{version}")
    return models.lora_requests[name]


@ours(lambda serving: getattr(serving.models, LOOKUP, None))
async def _check_model(original: Any, lookup: Lookup, self: Any, request: Any) -> Any:
    """Ask the server for every name that is not the base model's, unless its events told: adapters come and go there.

    While it is away, a request for a known name goes on: it waits for its adapter.
    """
    if self._is_model_supported(request.model):
        return await original(request)
    tenant, name = tenant_and_name(request.model) if CALLER.get() is not None else ("", request.model)
    known = request.model in self.models.lora_requests
    try:
        with NAME_SECONDS.time():
            adapter = await lookup.get(name, tenant, waits=not known)
    except ServerUnavailableError as error:
        return None if known else _refusal(error)
    except LoraServerError as error:
        self.models.lora_requests.pop(request.model, None)
        return _refusal(error)
    _listed(self.models, request.model, adapter.version)
    return None


def _lookup(models: Any) -> Lookup | None:
    return getattr(models, LOOKUP, None)


@ours(_lookup)
async def _load(original: Any, lookup: Lookup, self: Any, request: Any, base_model_name: str | None = None) -> Any:
    """Register a path on the server, for all its engines; only list a name of the server's own."""
    if CALLER.get() is not None:
        return await asyncio.to_thread(_load_as_caller, request)
    refused = await self._check_load_lora_adapter_request(request)
    if refused is not None:
        return refused
    name, path = request.lora_name, request.lora_path
    try:
        if path in (name, f"{KEY}:{name}"):
            adapter = await asyncio.to_thread(lookup.directory.get, name)
        else:
            adapter = await asyncio.to_thread(lookup.directory.add, name, as_uri(path))
            self.lora_server_added.add(name)
    except LoraServerError as error:
        return _refusal(error)
    _listed(self, adapter.name, adapter.version)
    return f"Success: LoRA adapter '{name}' added successfully."


@ours(_lookup)
async def _unload(original: Any, lookup: Lookup, self: Any, request: Any) -> Any:
    """Remove from the server what this engine's API added there."""
    if CALLER.get() is not None:
        answer = await asyncio.to_thread(_unload_as_caller, request)
        lookup.forget(request.lora_name)
        return answer
    if request.lora_name in self.lora_server_added:
        try:
            await asyncio.to_thread(lookup.directory.remove, request.lora_name)
        except UnknownAdapterError:
            pass  # removed elsewhere: done
        except LoraServerError as error:
            return _refusal(error)
        self.lora_server_added.discard(request.lora_name)
        lookup.forget(request.lora_name)  # its event may come later
    return await original(request)


def _load_as_caller(request: Any) -> Any:
    try:
        added = add_as_caller(request.lora_name, request.lora_path)
    except LoraServerError as error:
        return _refusal(error)
    return f"Success: LoRA adapter '{added.name}' added successfully."


def _unload_as_caller(request: Any) -> Any:
    try:
        remove_as_caller(request.lora_name)
    except LoraServerError as error:
        return _refusal(error)
    return f"Success: LoRA adapter '{request.lora_name}' removed successfully."


def _model_name(original: Any) -> Callable[..., Any]:
    """Name the model in answers as the request did, without the tenant."""

    def model_name(self: Any, lora_request: Any = None) -> Any:
        return tenant_and_name(original(self, lora_request))[1]

    return model_name


@ours(_lookup)
async def _show(original: Any, lookup: Lookup, self: Any) -> Any:
    """List on /v1/models what the server has, also adapters that no request has named yet."""
    models = await original()
    if CALLER.get() is not None:  # names that other tenants asked for stay theirs
        models.data = [card for card in models.data if self.is_base_model(card.id)]
    try:
        listed = await asyncio.to_thread(lookup.directory.list, callers_tenant())
    except (PermissionDeniedError, ServerUnavailableError):  # the tenant was removed, for example
        return models
    known = {card.id for card in models.data}
    parent = models.data[0].id
    models.data += [
        ModelCard(id=one.name, root=f"{KEY}:{one.name}@{one.version}", parent=parent)
        for one in listed
        if one.name not in known and one.state != "draining"
    ]
    return models


# -- answers


def _generate(original: Any) -> Callable[..., Any]:
    """Wrap generation: a request that our server failed raises that failure, instead of "Internal server error"."""

    async def generate(self: Any, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        async for output in original(self, *args, **kwargs):
            flags = [(one, parse_flag(one.stop_reason)) for one in output.outputs]
            for one, flag in flags:
                if flag is not None and one.finish_reason is not None:
                    REQUESTS.labels(flag[0] if flag[1] != "not_invoked" else flag[1]).inc()
                    if one.finish_reason == "error":
                        raise _raised(Failure(*flag[1:]))
            yield output

    return generate


def _raised(failure: Failure) -> Exception:
    """Choose the exception that vLLM answers with the failure's status."""
    kinds = {HTTPStatus.NOT_FOUND: VLLMNotFoundError, HTTPStatus.SERVICE_UNAVAILABLE: RetryableRequestError}
    kind: type[Exception] = kinds.get(status_of(failure), GenerationError)
    return kind(failure.message)


def _stacked(original: Any) -> Callable[..., AsgiApp]:
    """Give answers of 503 a Retry-After, where the application's engine has a LoRA server."""

    def build_middleware_stack(self: Any) -> AsgiApp:
        return with_retry_after(
            original(self), lambda: hasattr(getattr(self.state, "openai_serving_models", None), LOOKUP)
        )

    return build_middleware_stack
