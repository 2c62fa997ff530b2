"""Hooks of the front end: names resolved on the server, errors as answers."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from contextvars import ContextVar
from functools import partial
from typing import Any

from fastapi import FastAPI, HTTPException
from sglang.srt.entrypoints import http_server
from sglang.srt.entrypoints.ollama.serving import OllamaServing
from sglang.srt.entrypoints.openai.serving_base import OpenAIServingBase
from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat
from sglang.srt.entrypoints.openai.serving_completions import OpenAIServingCompletion
from sglang.srt.entrypoints.openai.serving_embedding import OpenAIServingEmbedding
from sglang.srt.entrypoints.openai.serving_responses import OpenAIServingResponses
from sglang.srt.entrypoints.openai.serving_tokenize import OpenAIServingDetokenize, OpenAIServingTokenize
from sglang.srt.lora.lora_registry import LoRARef
from sglang.srt.managers import tokenizer_manager
from sglang.srt.managers.io_struct import LoRAUpdateOutput
from sglang.srt.managers.tokenizer_manager import TokenizerManager

from client_connector.directory import as_uri
from client_connector.serving.http import AsgiApp, Message, Receive, Send, answer_to, with_retry_after
from client_connector.serving.lookup import Lookup
from client_connector.serving.settings import KEY, OF, find
from client_connector.serving.tenants import (
    CALLER,
    TenantMiddleware,
    add_as_caller,
    callers_tenant,
    remove_as_caller,
)
from client_connector.serving.wrapping import Wrap
from client_connector.sglang.names import UNNAMED, AdapterId, base_names
from client_connector.sglang.tenants import API, has_tenants
from lora_server.errors import LoraServerError, ServerUnavailableError, UnknownAdapterError

# of SGLang's APIs, those that look at a model's name, and those that generate nothing
WITH_NAMES = (OpenAIServingChat, OpenAIServingCompletion, OpenAIServingEmbedding)
WITHOUT_MODEL = (OpenAIServingTokenize, OpenAIServingDetokenize)
LISTED: ContextVar[dict[str, LoRARef]] = ContextVar("lora_server_listed")  # by name, in a call of /v1/models


def install(wrap: Wrap) -> None:
    """Wrap the registry of adapters, what changes it, and what reads a model's name."""
    wrap(tokenizer_manager, "LoRARegistry", lambda original: partial(ServerRegistry))
    wrap(http_server, "serve_generate_request", _serve_generate_request)
    wrap(TokenizerManager, "_validate_and_resolve_lora", _validate_and_resolve)
    wrap(TokenizerManager, "load_lora_adapter", _load)
    wrap(TokenizerManager, "unload_lora_adapter", _unload)
    wrap(OpenAIServingBase, "_resolve_lora_path", _resolve_lora_path)
    wrap(OpenAIServingBase, "handle_request", _handle_request)
    wrap(OpenAIServingResponses, "_validate_model", _validate_model)
    wrap(OllamaServing, "handle_chat", _handle_ollama)
    wrap(OllamaServing, "handle_generate", _handle_ollama)
    wrap(FastAPI, "build_middleware_stack", _stacked)
    wrap(http_server, "_freeze_gc_after_server_warmup", _freeze_gc)


# -- names


class ServerRegistry:
    """Stands in for SGLang's LoRARegistry: the server's names, looked up as requests name them."""

    num_registered_loras = 0  # there is no limit to keep

    def __init__(self, lora_paths: object = None) -> None:
        found = find(None, os.environ)
        assert found is not None  # the plugin is installed
        self._lookup = Lookup.of(found)
        self.directory = self._lookup.directory
        self.added: set[str] = set()  # names that this engine's API brought to the server
        self._ids: dict[str, AdapterId] = {}  # by tenant and name, the newest, for when the server is away
        self._salt = secrets.token_hex(8)

    async def get_unregistered_loras(self, names: set[str | None]) -> set[str]:
        """Return no name: `acquire` finds out."""
        return set()

    async def acquire(self, names: str | Sequence[str | None]) -> str | list[str | None]:
        """Return a name's id, or each one's. Raises HTTPException with the server's reason."""
        if isinstance(names, str):
            return await self._find(names)
        return [None if name is None else await self._find(name) for name in names]

    async def release(self, adapters: object) -> None:
        """Do nothing: the scheduler holds adapters for requests."""

    def get_all_adapters(self) -> dict[str, LoRARef]:
        """Return what `listed` found for this call of /v1/models."""
        return LISTED.get({})

    def listed(self) -> dict[str, LoRARef]:
        """List the server's adapters that the caller may use; none while it is away."""
        with suppress(LoraServerError):
            listed = self.directory.list(callers_tenant())
            return {one.name: _reference(one) for one in listed if one.state != "draining"}
        return {}

    def forget(self, name: str) -> None:
        """Drop what is known of a name: the next request asks the server."""
        self._lookup.forget(name)
        self._ids.pop(_of_tenant(name), None)

    async def _find(self, name: str) -> str:
        if OF in name:
            raise HTTPException(400, f"adapter: got {name[:100]!r}, expected a name without {OF!r}")
        own = _of_tenant(name)
        try:
            version = (await self._lookup.get(name, callers_tenant(), waits=own not in self._ids)).version
            self._ids[own] = AdapterId(self._salt, own, version)
        except ServerUnavailableError as error:
            if own not in self._ids:
                raise _refused(error) from error
        except LoraServerError as error:
            self._ids.pop(own, None)
            raise _refused(error) from error
        return str(self._ids[own])


def _of_tenant(name: str) -> str:
    tenant = callers_tenant()
    return f"{tenant}{OF}{name}" if tenant else name


def _refused(error: LoraServerError) -> HTTPException:
    return HTTPException(answer_to(error).status, str(error))


def _validate_and_resolve(original: Any) -> Callable[..., Any]:
    """Refuse an id from outside, which SGLang would take for one that it gave out."""

    async def resolve(self: Any, obj: Any) -> None:
        if obj.lora_id:
            raise ValueError(f"lora_id: got {obj.lora_id!r}, expected none; name the adapter in lora_path")
        await original(self, obj)

    return resolve


def _serve_generate_request(original: Any) -> Callable[..., Any]:
    """Look a streamed request's adapter up before the stream begins: a status cannot be sent later."""

    async def serve(obj: Any, request: Any) -> Any:
        if obj.stream and obj.lora_path:
            await http_server._global_state.tokenizer_manager.lora_registry.acquire(obj.lora_path)
        return await original(obj, request)

    return serve


def _reference(adapter: Any) -> LoRARef:
    shown = f"{KEY}:{adapter.name}@{adapter.version}"
    return LoRARef(lora_id=shown, lora_name=adapter.name, lora_path=shown)


def _load(original: Any) -> Callable[..., Any]:
    """Add the adapter at a path to the server, for all engines. If it names an adapter of the server, look it up."""

    async def load(self: Any, obj: Any, request: Any = None) -> LoRAUpdateOutput:
        registry: ServerRegistry = self.lora_registry
        name, path = obj.lora_name, obj.lora_path
        if obj.pinned:
            return _not_done(f"pinned: got true; pin it on the server: lora-server adapters pin {name}")
        try:
            if CALLER.get() is not None:
                adapter = await asyncio.to_thread(add_as_caller, name, path)
            elif path in (name, f"{KEY}:{name}"):
                adapter = await asyncio.to_thread(registry.directory.get, name)
            else:
                adapter = await asyncio.to_thread(registry.directory.add, name, as_uri(path))
                registry.added.add(name)
        except LoraServerError as error:
            return _not_done(str(error))
        return LoRAUpdateOutput(success=True, loaded_adapters={name: _reference(adapter)})

    return load


def _unload(original: Any) -> Callable[..., Any]:
    """Remove from the server what this engine's API added there."""

    async def unload(self: Any, obj: Any, request: Any = None) -> LoRAUpdateOutput:
        registry: ServerRegistry = self.lora_registry
        name = obj.lora_name
        try:
            if CALLER.get() is not None:
                await asyncio.to_thread(remove_as_caller, name)
            elif name in registry.added:
                with suppress(UnknownAdapterError):  # removed elsewhere: done
                    await asyncio.to_thread(registry.directory.remove, name)
                registry.added.discard(name)
            else:
                return _not_done(f"adapter {name!r}: was not added by this engine; remove it on the server")
        except LoraServerError as error:
            return _not_done(str(error))
        registry.forget(name)  # its event may come later
        return LoRAUpdateOutput(success=True, loaded_adapters={})

    return unload


def _not_done(reason: str) -> LoRAUpdateOutput:
    return LoRAUpdateOutput(success=False, error_message=reason)


# -- a model's name


def _is_base(manager: Any, model: str | None) -> bool:
    return model in UNNAMED or model in base_names(manager.served_model_name, manager.model_path)


def _resolve_lora_path(original: Any) -> Callable[..., Any]:
    """Take a model's name that is not the base model's for an adapter's, as vLLM does: SGLang ignores it."""

    def resolve(self: Any, request_model: str, explicit_lora_path: Any) -> Any:
        manager = self.tokenizer_manager
        if _is_base(manager, request_model):
            return explicit_lora_path
        for base in base_names(manager.served_model_name, manager.model_path):
            if request_model.startswith(f"{base}:"):
                return request_model.removeprefix(f"{base}:")
        return explicit_lora_path or request_model

    return resolve


def _handle_request(original: Any) -> Callable[..., Any]:
    """Refuse an adapter where SGLang would answer with the base model: its API does not look at the model's name."""

    async def handle(self: Any, request: Any, raw_request: Any) -> Any:
        model = getattr(request, "model", None)
        if isinstance(self, (*WITH_NAMES, *WITHOUT_MODEL)) or _is_base(self.tokenizer_manager, model):
            return await original(self, request, raw_request)
        return self.create_error_response(_no_adapters(model), status_code=404)

    return handle


def _validate_model(original: Any) -> Callable[..., Any]:
    def validate(self: Any, model: str | None) -> Any:
        if _is_base(self.tokenizer_manager, model):
            return None
        return self.create_error_response(message=_no_adapters(model), status_code=404, param="model")

    return validate


def _handle_ollama(original: Any) -> Callable[..., Any]:
    async def handle(self: Any, request: Any, raw_request: Any) -> Any:
        if not _is_base(self.tokenizer_manager, request.model):
            raise HTTPException(404, _no_adapters(request.model))
        return await original(self, request, raw_request)

    return handle


def _no_adapters(model: str | None) -> str:
    return (
        f"model: got {model!r}, expected the base model's name: this API of SGLang's does not look at the model; "
        "/v1/completions, /v1/chat/completions and /v1/messages do"
    )


# -- answers


def _stacked(original: Any) -> Callable[..., AsgiApp]:
    """Give SGLang's answers of 503 a Retry-After; with tenants, ask each caller for a token first."""

    def build_middleware_stack(self: Any) -> AsgiApp:
        stack: AsgiApp = original(self)
        if self is not http_server.app:
            return stack
        stack = _listing(stack)
        return with_retry_after(TenantMiddleware(stack, API) if has_tenants(os.environ) else stack, lambda: True)

    return build_middleware_stack


def _listing(app: AsgiApp) -> AsgiApp:
    """List the server's adapters before a call of /v1/models, in a thread: SGLang asks for them in its event loop."""

    async def listing(scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].removeprefix(scope.get("root_path", "")) == API.models:
            registry: ServerRegistry = http_server._global_state.tokenizer_manager.lora_registry
            LISTED.set(await asyncio.to_thread(registry.listed))
        await app(scope, receive, send)

    return listing


def _freeze_gc(original: Any) -> Callable[[Any], None]:
    """Leave out a request of SGLang's to itself that shows no token."""

    def freeze_gc(server_args: Any) -> None:
        if not has_tenants(os.environ):
            original(server_args)

    return freeze_gc
