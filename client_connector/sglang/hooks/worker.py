"""Hooks of an engine worker: a LoRA manager without weights, and the sites of its model."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.managers.io_struct import LoRAUpdateOutput
from sglang.srt.model_executor import model_runner

from client_connector.client import Client
from client_connector.directory import AdapterDirectory
from client_connector.geometry import check_geometry
from client_connector.packing import Window
from client_connector.remote import RemoteServer
from client_connector.serving.modules import attach
from client_connector.serving.plan import Failure, StepPlan
from client_connector.serving.planned import PlannedPass
from client_connector.serving.settings import find
from client_connector.serving.wrapping import Wrap
from client_connector.sglang.hooks.experts import attach_experts
from lora_server.spec import ModelSpec, Site

NO_ROWS: tuple[list[str], list[int], list[int]] = ([], [], [])
IN_SERVER = "the LoRA server manages adapters: add, update and remove them there"


class SglangLoRAManager:
    """Stands in for SGLang's LoRAManager; has no weights, so there is nothing to load or evict."""

    attn_dp_enabled = False
    supports_prefill_cuda_graph = False
    memory_pool = None

    def __init__(self, base_model: Any, base_hf_config: Any, server_args: Any, **unused: Any) -> None:
        """Join the server and hook the model's sites; raises ServerUnavailableError, GeometryMismatchError and
        ConfigError."""
        found = find(None, os.environ)
        assert found is not None  # the plugin is installed
        server = RemoteServer(
            found.address,
            found.transport,
            device=server_args.device,
            wire=found.wire,
            timings=found.timings,
            slo_class=found.slo_class,
        )
        client = Client(server, found.timeout_seconds)
        check_geometry(base_hf_config.to_dict(), client.terms.spec)
        self._directory = AdapterDirectory(found.address, timings=found.timings)
        self._forward = PlannedPass(client, self._directory.ready, found.timings.outage_step)
        self._expected = NO_ROWS
        attach("SGLang", base_model, self._forward, FusedMoE, attach_experts, _all_columns)

    # -- the scheduler's step

    def expect(self, plan: StepPlan, names: list[str], counts: list[int], computed: list[int]) -> None:
        """Take the plan of the next pass: so many tokens of each request, after those that were computed before."""
        self._forward.receive(plan)
        self._expected = names, counts, computed

    def end(self) -> dict[str, Failure]:
        """End the pass; return the requests that did not get their adapter's delta, each with its failure.

        Raises RuntimeError if SGLang has not begun it: its rows are the base model's.
        """
        if self._expected[0]:
            raise RuntimeError("SGLang ran a batch without preparing its adapters")
        return self._forward.end()

    # -- SGLang's model runner

    def prepare_lora_batch(self, forward_batch: Any) -> None:
        """Begin the expected pass; one that nothing announced, as a warm-up, has no adapters.

        Raises RuntimeError for other rows than those that were announced.
        """
        expected, self._expected = self._expected, NO_ROWS
        found = list(forward_batch.rids or ()) if expected[0] else [one for one in forward_batch.lora_ids or () if one]
        if found != expected[0]:
            raise RuntimeError(f"SGLang runs requests {found[:4]}, expected {expected[0][:4]}")
        self._forward.begin(*expected)

    def reset_lora_batch(self) -> None:
        """Begin a pass of no rows."""
        self._forward.begin(*NO_ROWS)

    def fetch_new_loras(self, adapters: set[str | None]) -> None:
        """Do nothing: there are no weights."""

    def reset_routing_cache(self) -> None:
        """Do nothing: there are no weights."""

    def validate_lora_batch(self, adapters: set[str | None]) -> bool:
        """Return True: a batch may have any number of adapters."""
        return True

    def can_use_prefill_cuda_graph(self, forward_batch: Any) -> bool:
        """Return False: an exchange of the host's cannot be captured."""
        return False

    def load_lora_adapter(self, lora_ref: Any) -> LoRAUpdateOutput:
        """Refuse: the front end sends adapters to the server."""
        return LoRAUpdateOutput(success=False, error_message=IN_SERVER)

    unload_lora_adapter = load_lora_adapter

    def load_lora_adapter_from_tensors(self, *given: Any) -> LoRAUpdateOutput:
        """Refuse."""
        return LoRAUpdateOutput(success=False, error_message=IN_SERVER)

    def close(self) -> None:
        """Leave the server."""
        self._forward.close()
        self._directory.close()


def _all_columns(module: Any, spec: ModelSpec, site: Site) -> Window:
    """Return all columns: a worker without tensor parallelism, which `arguments` asks for, has them."""
    return Window(0, ((0, spec.out_width(site)),))


def install(wrap: Wrap) -> None:
    """Replace the LoRA manager."""
    wrap(model_runner, "LoRAManager", lambda original: partial(SglangLoRAManager))
