"""Shards inside the caller's process and thread: for tests, benches and one-process use."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from typing_extensions import override

from client_connector.moves import MoveSlot
from client_connector.session import Server, Session
from lora_server.adapters import validate_adapter
from lora_server.daemon import backends
from lora_server.daemon.backends import Backend
from lora_server.errors import AdapterLoadError, LoraServerError, UnknownAdapterError
from lora_server.memory.entry import Source
from lora_server.placement import Layout, Placement
from lora_server.shard.coordination import Independent
from lora_server.shard.loop import Shard
from lora_server.spec import ModelSpec
from lora_server.transport.base import Grant, Link, Port
from lora_server.transport.inproc import InprocLink
from lora_server.wire.messages import Hello
from lora_server.wire.region import RegionLayout
from lora_server.wire.slot import Wire
from lora_server.wire.terms import Held, Proof, Terms

LOAD_SECONDS = 600.0


class InprocServer(Server):
    """Joinable like a remote server. `adapters` maps names to PEFT directories; all are loaded at once."""

    address = "this process"

    def __init__(
        self,
        spec: ModelSpec,
        adapters: Mapping[str, Path],
        *,
        layout: str = "ep1-pp1",
        dtype: torch.dtype = torch.float32,
        max_step_rows: int = 256,
        slots: int = 4,
        wire: Wire = "exact",
        base_weights: str = "",
        make_backend: Callable[[Placement, int, torch.dtype], Backend] = backends.host,
    ) -> None:
        self.placement = Placement(spec, Layout.parse(layout))
        self.max_step_rows, self.wire, self.base_weights = max_step_rows, wire, base_weights
        self.held: dict[str, Held] = {}
        self._clients = itertools.count(1)
        region = RegionLayout.for_model(spec, max_step_rows, slots, wire)
        built = [make_backend(self.placement, index, dtype) for index in range(self.placement.layout.num_shards)]
        self.shards = [
            Shard(index, spec, max_step_rows, Port(region), backend.store, Independent(), backend.compute, wire)
            for index, backend in enumerate(built)
        ]
        for handle, (name, path) in enumerate(sorted(adapters.items()), start=1):
            self._load(handle, name, path)

    def _load(self, handle: int, name: str, path: Path) -> None:
        adapter, version = validate_adapter(path, self.placement.spec)
        source = Source(path, version, adapter.stamp)
        with adapter:
            self.held[name] = Held(name, handle, frozenset(adapter.sites()), version, adapter.invocation)
        for shard in self.shards:
            loaded: Future[LoraServerError | None] = Future()
            shard.store.adapters.load(handle, source, loaded.set_result)
            try:
                error = loaded.result(LOAD_SECONDS)
            except TimeoutError:
                raise AdapterLoadError(f"adapter {name!r}: not loaded within {LOAD_SECONDS:g} s") from None
            if error is not None:
                raise error

    @override
    def join(self, seconds: float = 0.0) -> Session:
        """Join at once, without waiting."""
        return _InprocSession(self, next(self._clients))

    def connect(self, hello: Hello) -> list[Link]:
        """Return a client's links, one to each shard."""
        return [InprocLink(shard.port, hello, shard.index, shard.serve_once) for shard in self.shards]

    def close(self) -> None:
        """Free the weights."""
        for shard in self.shards:
            shard.store.close()


class _InprocSession(Session):
    def __init__(self, server: InprocServer, client: int) -> None:
        self._server = server
        placement, rows = server.placement, server.max_step_rows
        agreed: dict[str, Any] = {"wire": server.wire, "base_weights": server.base_weights}
        self.terms = Terms(client, 1, placement, "independent", rows, num_adapters=len(server.held), **agreed)
        for shard in server.shards:
            shard.port.grant(Grant(client, 1, b""))
            shard.port.hold(client, [held.handle for held in server.held.values()])
        self.links, self.moves = server.connect(Hello(client, 1, b"")), MoveSlot()

    @override
    def acquire(self, names: Sequence[str], deadline: float = 0.0, loaded: bool = False) -> list[Held]:
        held = self._server.held | {f"{one.name}@{one.version}": one for one in self._server.held.values()}
        unknown = [name for name in names if name not in held]
        if unknown:
            raise UnknownAdapterError(f"adapter {unknown[0]!r}: not registered here")
        return [held[name] for name in names]

    @override
    def release(self, handles: Sequence[int]) -> None:
        """Do nothing: adapters are never removed here."""

    @property
    @override
    def proof(self) -> Proof:
        return Proof(self.terms.client, self.terms.epoch, b"")

    @override
    def borrow(self, holder: Proof) -> None:
        """Do nothing: every session may use all adapters."""

    @override
    def prefetch(self, expected: Mapping[int, float]) -> None:
        """Do nothing: all adapters are loaded."""

    @override
    def check(self) -> None:
        """Do nothing: the lease cannot be lost."""

    @override
    def leave(self) -> None:
        for link in self.links:
            link.close()
