"""Hooks of an engine worker: a LoRA manager without weights, and the sites of its model."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import structlog
import torch
from vllm.distributed import get_tp_group
from vllm.model_executor.layers.fused_moe import MoERunner
from vllm.platforms import current_platform
from vllm.v1.worker import lora_model_runner_mixin as mixin
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from client_connector.client import Client, by_value
from client_connector.directory import AdapterDirectory
from client_connector.geometry import check_geometry
from client_connector.packing import Window
from client_connector.remote import RemoteServer
from client_connector.serving.launched import LaunchedPass, check_launches
from client_connector.serving.modules import attach, rank_window
from client_connector.serving.plan import FAILURES, NO_PLAN, PLAN
from client_connector.serving.planned import PlannedPass
from client_connector.serving.ranks import RankGroup
from client_connector.serving.settings import Settings
from client_connector.serving.wrapping import Wrap, ours
from client_connector.vllm.amx import ask_for_amx
from client_connector.vllm.hooks.moe import attach_experts
from client_connector.vllm.settings import of_engine
from lora_server.merged import find_merged
from lora_server.spec import ModelSpec, Site
from lora_server.wire.terms import Terms

log = structlog.get_logger()


class RemoteLoRAManager:
    """Stands in for vLLM's LRUCacheWorkerLoRAManager; has no weights, so there is nothing to load or evict."""

    is_enabled = True

    def __init__(self, found: Settings, vllm_config: Any, device: torch.device) -> None:
        """Join the server; raises ServerUnavailableError, GeometryMismatchError, WorldError, ConfigError."""

        def suits(terms: Terms) -> None:
            check_geometry(vllm_config.model_config.hf_config.to_dict(), terms.spec)
            if found.is_launched:
                check_launches(terms, vllm_config.model_config.dtype, vllm_config.scheduler_config.max_num_seqs)

        timings, first_seconds = found.timings, None
        server = RemoteServer(
            found.address,
            found.transport,
            device=str(device),
            wire=found.wire,
            timings=timings,
            slo_class=found.slo_class,
        )
        if found.transport == "nvshmem":  # a failed start loses its place in the world
            first_seconds = found.world_seconds
            suits(server.ask_terms(first_seconds))
        client = Client(server, found.timeout_seconds, first_seconds)
        suits(client.terms)
        self._directory = AdapterDirectory(found.address, timings=timings)
        self.forward = _forward(found, client, self._directory.ready, vllm_config)
        self._ids: set[int] = set()

    def create_lora_manager(self, model: Any, vllm_config: Any) -> Any:
        """Hook the sites of the model and return the model itself."""
        attach("vLLM", model, self.forward, MoERunner, attach_experts, _window)
        tell(self.forward.client)
        return model

    def set_active_adapters(self, requests: object, mapping: object) -> None:
        """Do nothing: each row's adapter comes from the scheduler's plan."""

    def add_adapter(self, lora_request: Any) -> bool:
        """Raises UnknownAdapterError for one that the server does not have."""
        self._directory.get(lora_request.lora_name)
        self._ids.add(lora_request.lora_int_id)
        return True

    def remove_adapter(self, adapter_id: int) -> bool:
        """Forget an id."""
        known = adapter_id in self._ids
        self._ids.discard(adapter_id)
        return known

    def remove_all_adapters(self) -> None:
        """Forget all ids."""
        self._ids.clear()

    def pin_adapter(self, adapter_id: int) -> bool:
        """Do nothing: the server decides what stays in memory."""
        return adapter_id in self._ids

    def list_adapters(self) -> set[int]:
        """Return the ids that were added."""
        return set(self._ids)

    @contextlib.contextmanager
    def dummy_lora_cache(self) -> Iterator[None]:
        """Do nothing: warm-up needs no adapters."""
        yield

    def add_dummy_lora(self, lora_request: Any, rank: int) -> bool:
        """Return True and add nothing: warm-up needs no adapters."""
        return True

    def get_dummy_lora_warmup_rank(self, default_rank: int) -> int:
        """Return the default; nothing is loaded for warm-up."""
        return default_rank

    def supports_tower_connector_lora(self) -> bool:
        """Return False: only text models are supported."""
        return False

    def close(self) -> None:
        """Leave the server."""
        self.forward.close()
        self._directory.close()


def _forward(found: Settings, client: Client, ready: Callable[[], bool], vllm_config: Any) -> PlannedPass:
    """Make the forward pass: on transports with kernels that send and wait, launches; on others the host exchanges."""
    if not found.is_launched:
        return PlannedPass(client, ready, found.timings.outage_step)
    scheduler = vllm_config.scheduler_config
    return LaunchedPass(
        client,
        ready,
        dtype=vllm_config.model_config.dtype,
        max_rows=scheduler.max_num_batched_tokens + vllm_config.parallel_config.tensor_parallel_size,  # padding
        max_adapters=scheduler.max_num_seqs,
        merged=find_merged(vllm_config.model_config.model) is not None,
        outage_seconds=found.timings.outage_step,
    )


def _ranks() -> RankGroup:
    return RankGroup(get_tp_group().cpu_group)


def tell(client: Client) -> None:
    """Log one line per engine, from its first tensor-parallel rank. All ranks must call it."""
    ranks, said = _ranks(), client.described()
    transports = ranks.gather(said["transport"])
    if ranks.is_first:
        log.info("attached to the LoRA server", **said | {"transport": by_value(dict(enumerate(transports)), "rank")})


def _window(module: Any, spec: ModelSpec, site: Site) -> Window:
    return rank_window(spec, site, module.tp_rank, module.tp_size, getattr(module, "num_kv_head_replicas", 1))


# -- the model runner


def install(wrap: Wrap) -> None:
    """Wrap the runner's use of its LoRA manager."""
    wrap(mixin, "LRUCacheWorkerLoRAManager", _manager)
    runner = mixin.LoRAModelRunnerMixin
    wrap(runner, "set_active_loras", _set_active_loras)
    wrap(runner, "maybe_setup_dummy_loras", _no_dummies)
    wrap(runner, "maybe_select_dummy_loras", _rehearse)
    wrap(GPUModelRunner, "execute_model", _execute_model)
    wrap(GPUModelRunner, "sample_tokens", _sample_tokens)
    wrap(GPUModelRunner, "shutdown", _shutdown)


def _manager(original: Any) -> Callable[..., Any]:
    def manager(vllm_config: Any, device: Any, *args: Any, **kwargs: Any) -> Any:
        found = of_engine(vllm_config)
        if found is None:
            return original(vllm_config, device, *args, **kwargs)
        if current_platform.is_cpu():
            ask_for_amx(vllm_config.model_config.dtype)  # in each worker, before its first step
        return RemoteLoRAManager(found, vllm_config, torch.device(device))

    return manager


def _remote(runner: Any) -> RemoteLoRAManager | None:
    manager = getattr(runner, "lora_manager", None)
    return manager if isinstance(manager, RemoteLoRAManager) else None


@ours(_remote)
def _set_active_loras(
    original: Any, manager: RemoteLoRAManager, self: Any, input_batch: Any, num_scheduled_tokens: Any, *rest: Any
) -> Any:
    req_ids = input_batch.req_ids
    computed = input_batch.num_computed_tokens_cpu[: len(req_ids)]
    return manager.forward.begin(req_ids, num_scheduled_tokens.tolist(), computed.tolist())


@ours(_remote)
def _no_dummies(original: Any, manager: RemoteLoRAManager, self: Any, *args: Any, **kwargs: Any) -> Any:
    return contextlib.nullcontext()


@ours(_remote)
def _rehearse(original: Any, manager: RemoteLoRAManager, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Warm up or capture graphs: those for steps with adapters hold the launches of every site, the others none."""
    given = inspect.signature(original).bind(*args, **kwargs).arguments
    return manager.forward.rehearse(given.get("num_active_loras", 0) > 0)


@ours(_remote)
def _execute_model(
    original: Any, manager: RemoteLoRAManager, self: Any, scheduler_output: Any, *args: Any, **kwargs: Any
) -> Any:
    plan = getattr(scheduler_output, PLAN, NO_PLAN)
    manager.forward.receive(plan)
    output = original(scheduler_output, *args, **kwargs)
    failures = manager.forward.end()
    self.lora_server_failures = _ranks().agree(failures) if plan.rows else {}
    return _with_failures(output, self)


@ours(_remote)
def _sample_tokens(original: Any, manager: RemoteLoRAManager, self: Any, *args: Any, **kwargs: Any) -> Any:
    return _with_failures(original(*args, **kwargs), self)


def _with_failures(output: Any, runner: Any) -> Any:
    if output is not None and runner.lora_server_failures:
        setattr(getattr(output, "_model_runner_output", output), FAILURES, runner.lora_server_failures)
        runner.lora_server_failures = {}
    return output


@ours(_remote)
def _shutdown(original: Any, manager: RemoteLoRAManager, self: Any) -> Any:
    manager.close()
    return original()
