"""A client's lease, the terms that it agrees on with the server, and the adapters that it holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from lora_server.placement import Layout, Placement
from lora_server.spec import Invocation, ModelSpec, Site
from lora_server.wire.slot import Wire

MAX_PREFETCHED = 256  # adapters that one client may announce at a time


class Proof(NamedTuple):
    """A client's credentials, which sign every call."""

    client: int
    epoch: int
    key: bytes


@dataclass(frozen=True)
class Terms:
    """The terms of a lease, which client and server go by. `max_step_rows` bounds the entries of one message."""

    client: int
    epoch: int
    placement: Placement
    coordination: str
    max_step_rows: int
    server: str = ""  # the run of the server that granted the lease: handles mean nothing to another
    hidden_adapters: tuple[str, ...] = ()  # adapters that the client cannot serve: its base model has their names
    num_adapters: int = 0  # of the server when this was agreed
    wire: Wire = "exact"
    base_weights: str = ""  # fingerprint of the server's base model; empty: it has no weights

    @property
    def spec(self) -> ModelSpec:
        """The model that the adapters are for."""
        return self.placement.spec

    @property
    def layout(self) -> Layout:
        """The layout of its shards."""
        return self.placement.layout


@dataclass(frozen=True)
class Held:
    """An adapter that the session holds; it is not removed before it is released."""

    name: str
    handle: int
    sites: frozenset[Site]
    version: str = ""
    invocation: Invocation | None = None
