"""Hooks of the front end: how an engine is configured, names resolved on the server, errors said aloud."""

from __future__ import annotations

import asyncio
import dataclasses
import os
from collections.abc import AsyncIterator, Callable
from contextlib import closing
from http import HTTPStatus
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from prometheus_client import Counter
from vllm.config import CUDAGraphMode
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.serve import create_error_response
from vllm.entrypoints.serve.engine.protocol import ModelCard
from vllm.entrypoints.serve.engine.serving import BaseServing
from vllm.exceptions import GenerationError, RetryableRequestError, VLLMNotFoundError
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform
from vllm.v1.engine.async_llm import AsyncLLM

from client_connector.directory import Directory
from client_connector.serving.lookup import Lookup
from client_connector.serving.plan import Failure, parse_flag
from client_connector.serving.settings import ADDRESS, KEY, Settings, whose
from client_connector.vllm.graphs import split_graphs
from client_connector.vllm.hooks.retry_after import LOOKUP, stacked
from client_connector.vllm.settings import of_engine
from client_connector.vllm.tenants import CALLER
from lora_server.errors import (
    AdapterError,
    ConfigError,
    LimitError,
    LoraServerError,
    PermissionDeniedError,
    ServerUnavailableError,
    UnauthenticatedError,
    UnknownAdapterError,
)
from lora_server.wire.credentials import Credentials

# at vLLM's /metrics; outcome: error, base_model (a step failed), not_invoked (an activated LoRA)
REQUESTS = Counter("lora_server_requests", "Requests that did not get their adapter's answer", ["outcome"])
MANY = 1 << 20  # of adapters in one batch; nothing is allocated for them
_DIRECTORY = "lora_server_directory"  # attribute of an OpenAIServingModels of ours
Wrap = Callable[[Any, str, Callable[[Any], Callable[..., Any]]], None]


def install(wrap: Wrap) -> None:
    """Wrap the model list, the check of a request's model, and the answers."""
    wrap(OpenAIServingModels, "__init__", _init)
    wrap(OpenAIServingModels, "load_lora_adapter", _load)
    wrap(OpenAIServingModels, "unload_lora_adapter", _unload)
    wrap(OpenAIServingModels, "show_available_models", _show)
    wrap(OpenAIServingModels, "model_name", _model_name)
    wrap(BaseServing, "_check_model", _check_model)
    wrap(AsyncLLM, "generate", _generate)
    wrap(FastAPI, "build_middleware_stack", stacked)


# -- configuration


def configure(args: Any, found: Settings) -> None:
    """LoRA on, without a limit, in the model runner that we know; the settings travel in the engine's config."""
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


def served_names(args: Any) -> tuple[str, ...]:
    """What requests for the base model ask for."""
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
            directory = Directory(found.address, timings=found.timings)
            setattr(self, _DIRECTORY, directory)
            setattr(self, LOOKUP, Lookup(directory, found.timeout_seconds, look_seconds=found.timings.lookup))
            self.lora_server_added = set()  # names that this engine's API brought to the server

    return init


def _refusal(error: LoraServerError) -> Any:
    """An error of ours as vLLM's answer: 404 unknown, 403 and 429 a tenant's rights and limits, 400 bad
    adapter, 503 no server."""
    if isinstance(error, UnknownAdapterError):
        return create_error_response(str(error), "NotFoundError", HTTPStatus.NOT_FOUND, "model")
    if isinstance(error, (PermissionDeniedError, UnauthenticatedError)):
        return create_error_response(str(error), "PermissionDeniedError", HTTPStatus.FORBIDDEN, "model")
    if isinstance(error, LimitError):
        return create_error_response(str(error), "RateLimitError", HTTPStatus.TOO_MANY_REQUESTS, "model")
    if isinstance(error, (AdapterError, ConfigError)):
        return create_error_response(str(error), "BadRequestError", HTTPStatus.BAD_REQUEST, "model")
    return create_error_response(str(error), "ServiceUnavailableError", HTTPStatus.SERVICE_UNAVAILABLE, "model")


def _listed(models: Any, name: str, version: str) -> Any:
    """vLLM's request for an adapter, under the same id as long as the engine knows the name."""
    known = models.lora_requests.get(name)
    number = known.lora_int_id if known is not None else models.lora_id_counter.inc(1)
    models.lora_requests[name] = LoRARequest(name, number, f"{KEY}:{name}@{version}")
    return models.lora_requests[name]


def _check_model(original: Any) -> Callable[..., Any]:
    """Ask the server for every name that is not the base model's: adapters come and go there. While it is away, a name
    that is known goes on: whoever holds its adapter waits."""

    async def check_model(self: Any, request: Any) -> Any:
        lookup: Lookup | None = getattr(self.models, LOOKUP, None)
        if lookup is None or self._is_model_supported(request.model):
            return await original(self, request)
        tenant, name = whose(request.model) if CALLER.get() is not None else ("", request.model)
        known = request.model in self.models.lora_requests
        try:
            adapter = await lookup.get(name, tenant, waits=not known)
        except ServerUnavailableError as error:
            return None if known else _refusal(error)
        except LoraServerError as error:
            self.models.lora_requests.pop(request.model, None)
            return _refusal(error)
        _listed(self.models, request.model, adapter.version)
        return None

    return check_model


def _load(original: Any) -> Callable[..., Any]:
    """A path is registered on the server, for all its engines; a name of the server's own is only listed."""

    async def load_lora_adapter(self: Any, request: Any, base_model_name: str | None = None) -> Any:
        directory: Directory | None = getattr(self, _DIRECTORY, None)
        if directory is None:
            return await original(self, request, base_model_name)
        if CALLER.get() is not None:
            return await asyncio.to_thread(_load_as_caller, request)
        refused = await self._check_load_lora_adapter_request(request)
        if refused is not None:
            return refused
        name, path = request.lora_name, request.lora_path
        try:
            if path in (name, f"{KEY}:{name}"):
                adapter = await asyncio.to_thread(directory.get, name)
            else:
                adapter = await asyncio.to_thread(directory.add, name, _uri(path))
                self.lora_server_added.add(name)
        except LoraServerError as error:
            return _refusal(error)
        _listed(self, adapter.name, adapter.version)
        return f"Success: LoRA adapter '{name}' added successfully."

    return load_lora_adapter


def _unload(original: Any) -> Callable[..., Any]:
    """What this engine's API brought to the server goes from there too."""

    async def unload_lora_adapter(self: Any, request: Any) -> Any:
        directory: Directory | None = getattr(self, _DIRECTORY, None)
        if directory is not None and CALLER.get() is not None:
            return await asyncio.to_thread(_unload_as_caller, request)
        if directory is not None and request.lora_name in self.lora_server_added:
            try:
                await asyncio.to_thread(directory.remove, request.lora_name)
            except UnknownAdapterError:
                pass  # somebody else removed it: what was asked for is done
            except LoraServerError as error:
                return _refusal(error)
            self.lora_server_added.discard(request.lora_name)
        return await original(self, request)

    return unload_lora_adapter


def _load_as_caller(request: Any) -> Any:
    """By the token that was shown: the adapter is its tenant's, and what it may not it is told."""
    try:
        with closing(_as_caller()) as directory:
            added = directory.add(request.lora_name, _uri(request.lora_path))
    except LoraServerError as error:
        return _refusal(error)
    return f"Success: LoRA adapter '{added.name}' added successfully."


def _unload_as_caller(request: Any) -> Any:
    try:
        with closing(_as_caller()) as directory:
            directory.remove(request.lora_name)
    except LoraServerError as error:
        return _refusal(error)
    return f"Success: LoRA adapter '{request.lora_name}' removed successfully."


def _as_caller() -> Directory:
    caller = CALLER.get()
    assert caller is not None
    return Directory(os.environ[ADDRESS], Credentials.of(os.environ, caller.token))


def _uri(path: str) -> str:
    return path if "://" in path else str(Path(os.path.expanduser(path)).absolute())  # noqa: PTH111  (never raises)


def _model_name(original: Any) -> Callable[..., Any]:
    """What answers call the model: as it was asked for, without the tenant."""

    def model_name(self: Any, lora_request: Any = None) -> Any:
        return whose(original(self, lora_request))[1]

    return model_name


def _show(original: Any) -> Callable[..., Any]:
    """/v1/models: also what the server has and nobody asked for yet."""

    async def show_available_models(self: Any) -> Any:
        models = await original(self)
        directory: Directory | None = getattr(self, _DIRECTORY, None)
        if directory is None:
            return models
        caller = CALLER.get()
        if caller is not None:  # what others asked for is not theirs to see
            models.data = [card for card in models.data if self.is_base_model(card.id)]
        try:
            listed = await asyncio.to_thread(directory.list, caller.tenant if caller is not None else "")
        except (PermissionDeniedError, ServerUnavailableError):  # a tenant that is none any more
            return models
        known = {card.id for card in models.data}
        parent = models.data[0].id
        models.data += [
            ModelCard(id=one.name, root=f"{KEY}:{one.name}@{one.version}", parent=parent)
            for one in listed
            if one.name not in known and one.state != "draining"
        ]
        return models

    return show_available_models


# -- answers


def _generate(original: Any) -> Callable[..., Any]:
    """A request that failed for a reason of ours raises with that reason, instead of "Internal server error"."""

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
    """404 unknown, 503 where the same request may succeed later (gateways try those again), 500 otherwise."""
    kind: type[Exception] = RetryableRequestError if failure.passes else GenerationError
    if failure.code == UnknownAdapterError.code:
        kind = VLLMNotFoundError
    return kind(failure.message)
