"""Hooks of the front end: the engine's arguments, names resolved on the server, errors as answers."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from functools import partial
from typing import Any

from fastapi import HTTPException
from sglang.srt.entrypoints.openai.serving_base import OpenAIServingBase
from sglang.srt.environ import envs
from sglang.srt.lora.lora_registry import LoRARef
from sglang.srt.managers import tokenizer_manager
from sglang.srt.managers.io_struct import LoRAUpdateOutput
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.server_args import ServerArgs

from client_connector.directory import AdapterDirectory, as_uri
from client_connector.events import EventFollower
from client_connector.reconnect import while_away
from client_connector.serving.http import RETRY_AFTER_SECONDS, answer_to
from client_connector.serving.lookup import Lookup
from client_connector.serving.settings import ERROR, KEY, Settings, find
from client_connector.serving.wrapping import Wrap, end_with_one_line
from lora_server.errors import ConfigError, LoraServerError, ServerUnavailableError, UnknownAdapterError
from lora_server.merged import find_merged

MANY = 1 << 20  # of adapters in one batch; nothing is allocated for them
ANY_MODEL = ("", "default")  # what clients that do not care call the model


def lora_id(name: str, version: str, start: int = 0) -> str:
    """Return what SGLang knows an adapter's version by: part of the key of its KV cache."""
    return f"{KEY}:{name}@{version}{f'#{start}' if start else ''}"


def name_in(adapter: str) -> str:
    """Return the name in a `lora_id`."""
    return adapter.removeprefix(f"{KEY}:").rpartition("@")[0]


def install(wrap: Wrap) -> None:
    """Wrap the arguments, the registry of adapters, and what changes it."""
    wrap(ServerArgs, "resolve_once", _resolve_once)
    wrap(tokenizer_manager, "LoRARegistry", lambda original: partial(ServerRegistry))
    wrap(TokenizerManager, "load_lora_adapter", _load)
    wrap(TokenizerManager, "unload_lora_adapter", _unload)
    wrap(OpenAIServingBase, "_resolve_lora_path", _resolve_lora_path)


# -- arguments


def _resolve_once(original: Any) -> Callable[..., None]:
    def resolve_once(self: Any) -> None:
        if not getattr(self, "_resolution_finished", False):
            found = find(None, os.environ)
            assert found is not None  # the plugin is installed
            try:
                check(self, found)
                with closing(AdapterDirectory(found.address, timings=found.timings)) as directory:
                    while_away(found.timeout_seconds)(directory.status)  # before workers start that would all fail
            except LoraServerError as error:
                end_with_one_line(error)
                raise
            configure(self)
        original(self)

    return resolve_once


def check(args: Any, found: Settings) -> None:
    """Raise ConfigError for what would go wrong, or answer with the base model in silence."""
    for name, got, expected in (
        ("tp_size", args.tp_size, 1),
        ("pp_size", args.pp_size, 1),
        ("dp_size", args.dp_size, 1),
        ("tokenizer_worker_num", args.tokenizer_worker_num, 1),
        ("disaggregation_mode", args.disaggregation_mode, "null"),
        ("speculative_algorithm", args.speculative_algorithm, None),
        ("enable_mixed_chunk", args.enable_mixed_chunk, False),
        ("lora_paths", args.lora_paths or None, None),
        ("on_failure", found.on_failure, ERROR),
        ("transport gpu or nvshmem", found.is_launched, False),
        ("SGLANG_RUST_SERVER", bool(envs.SGLANG_RUST_SERVER.get()), False),
        ("an adapter merged into the weights", find_merged(args.model_path) is not None, False),
    ):
        if got != expected:
            raise ConfigError(f"{name}: got {got}, expected {expected}; not supported with the LoRA server yet")


def configure(args: Any) -> None:
    """Enable LoRA without a limit, and what an exchange of the host's needs: each step ends before the next begins."""
    args.enable_lora, args.max_loras_per_batch, args.max_loaded_loras = True, MANY, None
    args.max_lora_rank, args.lora_target_modules = 1, ["all"]  # of weights that are never allocated
    args.disable_overlap_schedule = args.disable_cuda_graph = True


# -- names


class ServerRegistry:
    """Stands in for SGLang's LoRARegistry: the server's names, looked up as requests name them."""

    num_registered_loras = 0  # there is no limit to keep

    def __init__(self, lora_paths: object = None) -> None:
        found = find(None, os.environ)
        assert found is not None  # the plugin is installed
        self.directory = AdapterDirectory(found.address, timings=found.timings)
        known = EventFollower(found.address, timings=found.timings).known
        self.lookup = Lookup(self.directory, found.timeout_seconds, look_seconds=found.timings.lookup, known=known)
        self.added: set[str] = set()  # names that this engine's API brought to the server
        self._last: dict[str, str] = {}  # a name's newest version, while the server is away

    async def get_unregistered_loras(self, names: set[str | None]) -> set[str]:
        """Return no name: `acquire` finds out."""
        return set()

    async def acquire(self, names: str | Sequence[str | None]) -> str | list[str | None]:
        """Return a name's `lora_id`, or each one's. Raises HTTPException with the server's reason."""
        if isinstance(names, str):
            return await self._find(names)
        return [None if name is None else await self._find(name) for name in names]

    async def release(self, adapters: object) -> None:
        """Do nothing: the scheduler holds adapters for requests."""

    def get_all_adapters(self) -> dict[str, LoRARef]:
        """List the server's adapters, for /v1/models; none while it is away."""
        with suppress(LoraServerError):
            if self.directory.ready():
                listed = [one for one in self.directory.list() if one.state != "draining"]
                return {one.name: _reference(one.name, one.version) for one in listed}
        return {}

    def forget(self, name: str) -> None:
        """Ask the server for a name the next time."""
        self.lookup.forget(name)
        self._last.pop(name, None)

    async def _find(self, name: str) -> str:
        try:
            self._last[name] = (await self.lookup.get(name, waits=name not in self._last)).version
        except ServerUnavailableError as error:
            if name not in self._last:
                raise _refused(error) from error
        except LoraServerError as error:
            self._last.pop(name, None)
            raise _refused(error) from error
        return lora_id(name, self._last[name])


def _reference(name: str, version: str) -> LoRARef:
    return LoRARef(lora_id=lora_id(name, version), lora_name=name, lora_path=lora_id(name, version))


def _refused(error: LoraServerError) -> HTTPException:
    status = answer_to(error).status
    headers = {"Retry-After": RETRY_AFTER_SECONDS.decode()} if status == 503 else None
    return HTTPException(status, str(error), headers)


def _load(original: Any) -> Callable[..., Any]:
    """Register a path on the server, for all its engines; only find a name of the server's own."""

    async def load(self: Any, obj: Any, request: Any = None) -> LoRAUpdateOutput:
        registry: ServerRegistry = self.lora_registry
        name, path = obj.lora_name, obj.lora_path
        try:
            if path in (name, f"{KEY}:{name}"):
                adapter = await asyncio.to_thread(registry.directory.get, name)
            else:
                adapter = await asyncio.to_thread(registry.directory.add, name, as_uri(path))
                registry.added.add(name)
        except LoraServerError as error:
            return LoRAUpdateOutput(success=False, error_message=str(error))
        reference = _reference(adapter.name, adapter.version)
        return LoRAUpdateOutput(success=True, loaded_adapters={name: reference})

    return load


def _unload(original: Any) -> Callable[..., Any]:
    """Remove from the server what this engine's API added there."""

    async def unload(self: Any, obj: Any, request: Any = None) -> LoRAUpdateOutput:
        registry: ServerRegistry = self.lora_registry
        name = obj.lora_name
        if name not in registry.added:
            text = f"adapter {name!r}: was not added by this engine; remove it on the server"
            return LoRAUpdateOutput(success=False, error_message=text)
        try:
            with suppress(UnknownAdapterError):  # removed elsewhere: done
                await asyncio.to_thread(registry.directory.remove, name)
        except LoraServerError as error:
            return LoRAUpdateOutput(success=False, error_message=str(error))
        registry.added.discard(name)
        registry.forget(name)  # its event may come later
        return LoRAUpdateOutput(success=True, loaded_adapters={})

    return unload


def _resolve_lora_path(original: Any) -> Callable[..., Any]:
    """Take a model's name that is not the base model's for an adapter's, as vLLM does: SGLang ignores it."""

    def resolve(self: Any, request_model: str, explicit_lora_path: Any) -> Any:
        path = original(self, request_model, explicit_lora_path)
        base = (self.tokenizer_manager.served_model_name, self.tokenizer_manager.model_path, *ANY_MODEL)
        return request_model if path is None and request_model not in base else path

    return resolve
