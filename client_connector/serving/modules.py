"""Finds the sites of a worker's model by the names of its modules, and hooks each."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

from client_connector.packing import Window
from client_connector.serving.linear import RemoteLinear
from client_connector.serving.planned import PlannedPass
from lora_server.errors import ConfigError
from lora_server.spec import ModelSpec, Site

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_PROJECTIONS = {"qkv_proj": "qkv", "o_proj": "o", "gate_up_proj": "gate_up", "down_proj": "down"}


def attach(
    engine: str,
    model: Any,
    forward: PlannedPass,
    experts: type,
    attach_experts: Callable[[Any, PlannedPass, int], None],
    window: Callable[[Any, ModelSpec, Site], Window],
) -> None:
    """Hook every site of a worker's model; raises ConfigError naming those that it lacks.

    `experts`: the class of a layer's experts, which `attach_experts` hooks. `window`: the columns of a dense site that
    the module has.
    """
    spec = forward.client.terms.spec
    missing = set(spec.sites())
    for name, module in model.named_modules():
        layer = _LAYER.search(f"{name}.")
        if layer is None:
            continue
        if isinstance(module, experts):
            attach_experts(module, forward, int(layer[1]))
            missing -= {Site(int(layer[1]), "gate_up"), Site(int(layer[1]), "down")}
            continue
        site = Site(int(layer[1]), _PROJECTIONS.get(name.rpartition(".")[2], ""))
        if site in missing and spec.is_dense(site) and hasattr(module, "quant_method"):
            _attach_linear(module, forward, site, window(module, spec, site))
            missing.discard(site)
    if missing:
        raise ConfigError(
            f"{engine}'s {type(model).__name__}: no layer found for {sorted(missing)[:4]}; this model is not supported"
        )


def _attach_linear(module: Any, forward: PlannedPass, site: Site, window: Window) -> None:
    """Put the exchange around the module's GEMM, before any all-reduce. Its method may be shared, so it is copied."""
    method = copy.copy(module.quant_method)
    method.apply = RemoteLinear(forward, site, window).around(module.quant_method.apply)
    module.quant_method = method


def rank_window(spec: ModelSpec, site: Site, rank: int, size: int, kv_replicas: int = 1) -> Window:
    """Return the columns of a dense site that one of `size` tensor-parallel ranks has; each key and value head is on
    `kv_replicas` of them."""
    if size == 1 or site.projection in ("o", "down"):
        return Window(rank * spec.in_width(site) // size, ((0, spec.out_width(site)),))
    parts = []
    for section in spec.sections(site):
        own, of = (rank // kv_replicas, size // kv_replicas) if section.name in ("k", "v") else (rank, size)
        width = (section.end - section.begin) // of
        parts.append((section.begin + own * width, section.begin + (own + 1) * width))
    return Window(0, tuple(parts))
