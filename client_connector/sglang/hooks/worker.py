"""Hooks of an engine worker: a LoRA manager without weights, and the sites of its model."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

from sglang.srt.distributed.utils import get_group_rank_size
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.managers.io_struct import LoRAUpdateOutput
from sglang.srt.model_executor import model_runner

from client_connector.client import Client
from client_connector.directory import AdapterDirectory
from client_connector.geometry import check_geometry
from client_connector.packing import Window
from client_connector.remote import RemoteServer
from client_connector.serving.modules import attach, rank_window
from client_connector.serving.plan import Failure, StepPlan
from client_connector.serving.planned import PlannedPass
from client_connector.serving.settings import find
from client_connector.serving.wrapping import Wrap
from client_connector.sglang.hooks.experts import attach_experts
from lora_server.errors import ConfigError
from lora_server.spec import ModelSpec, Site

PADDED = {  # sizes in a model's configuration, and where SGLang keeps what they were
    "num_attention_heads": "original_num_attention_heads",
    "num_key_value_heads": "original_total_num_kv_heads",
    "intermediate_size": "original_intermediate_size",
    "moe_intermediate_size": "original_moe_intermediate_size",
}
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
        _check_unpadded(base_hf_config)
        check_geometry(base_hf_config.to_dict(), client.terms.spec)
        self._directory = AdapterDirectory(found.address, timings=found.timings)
        self._forward = PlannedPass(client, self._directory.ready, found.timings.outage_step)
        self._expected = NO_ROWS
        attach("SGLang", base_model, self._forward, FusedMoE, attach_experts, _window)

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


def _check_unpadded(config: Any) -> None:
    """Raise ConfigError where SGLang has changed the model's sizes so that its ranks on CPUs share them evenly."""
    for name, original in PADDED.items():
        was, now = getattr(config, original, None), getattr(config, name, None)
        if was is not None and was != now:
            raise ConfigError(
                f"{name}: SGLang pads the model's {was} to {now} for its tensor-parallel ranks on CPUs, expected a "
                "--tp-size for which it does not"
            )


def _window(module: Any, spec: ModelSpec, site: Site) -> Window:
    """Return the columns of this tensor-parallel rank; raises ConfigError where its module has others."""
    rank, size = get_group_rank_size(getattr(module, "tp_group", None))
    window = rank_window(spec, site, rank, size, getattr(module, "num_kv_head_replicas", 1))
    got = (
        getattr(module, "input_size_per_partition", module.input_size),
        getattr(module, "output_size_per_partition", module.output_size),
    )
    own_inputs = spec.in_width(site) // size if site.projection in ("o", "down") else spec.in_width(site)
    expected = own_inputs, sum(end - begin for begin, end in window.out)
    if got != expected:
        raise ConfigError(
            f"{site}: rank {rank} of {size} has {got[0]} input and {got[1]} output columns, expected {expected[0]} and "
            f"{expected[1]}; a tensor-parallel size that divides the model's heads and ffn is needed"
        )
    return window


def install(wrap: Wrap) -> None:
    """Replace the LoRA manager."""
    wrap(model_runner, "LoRAManager", lambda original: partial(SglangLoRAManager))
