"""The controller: adapters, leases and shards put together. No sockets here; `service` has them."""

from __future__ import annotations

import hashlib
import secrets
import threading
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

import structlog

from lora_server.adapters import validate_adapter
from lora_server.control.leases import ClientLease, Leases
from lora_server.control.registry import Record, Registry, check_name
from lora_server.control.shards import PendingCommand, ShardHandle, ShardTable, wait_all
from lora_server.errors import AdapterError, AdapterFormatError, ConfigError, LoraServerError, ShardUnavailableError
from lora_server.placement import Layout, Placement
from lora_server.spec import ModelSpec
from lora_server.wire import lora_server_pb2 as pb

GRANT_SECONDS = 10.0
log = structlog.get_logger()


@dataclass(frozen=True)
class Agreement:
    """What all nodes of one server must share."""

    spec: ModelSpec
    layout: Layout
    dtype: str
    coordination: str
    max_step_rows: int

    def digest(self) -> str:
        """A digest that shards show when they register."""
        parts = (self.spec.fingerprint(), self.layout, self.dtype, self.coordination, self.max_step_rows)
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]

    def describe(self) -> str:
        """For the error when two nodes disagree."""
        return (
            f"model {self.spec.name} ({self.spec.fingerprint()}), layout {self.layout}, dtype {self.dtype}, "
            f"coordination {self.coordination}, max-step-rows {self.max_step_rows}"
        )


def local_path(uri: str) -> Path:
    """The directory that a URI names; raises AdapterFormatError for a scheme that is not supported."""
    parts = urlsplit(uri)
    if parts.scheme == "file":
        return Path(unquote(parts.path))
    if parts.scheme and "://" in uri:
        raise AdapterFormatError(f"adapter source {uri!r}: got scheme {parts.scheme!r}, expected file:// or a path")
    return Path(uri).expanduser().resolve()


class Controller:
    """Thread-safe. `adapters_registered` turns true once the start-up directory is listed."""

    def __init__(self, agreement: Agreement, leases: Leases | None = None) -> None:
        self.agreement = agreement
        self.placement = Placement(agreement.spec, agreement.layout)
        self.shards = ShardTable(agreement.layout, agreement.coordination)
        self.leases = leases or Leases()
        self.registry = Registry()
        self.adapters_registered = threading.Event()
        self.run = secrets.token_hex(8)  # handles mean nothing to another run
        self._lock = threading.Lock()

    # -- adapters

    def register(self, name: str, uri: str) -> tuple[Record, list[PendingCommand], bool]:
        """Validate and list an adapter, and tell every live shard to load it; True if it is new.

        May read the whole file. Shards that register later are told then.
        """
        path = local_path(uri)
        check_name(name)
        adapter, version = validate_adapter(path, self.agreement.spec)
        with adapter:
            record = Record(
                name=name,
                version=version,
                path=str(path),
                stamp=adapter.stamp,
                lora_rank=adapter.lora_rank,
                nbytes=adapter.nbytes,
                sites=adapter.sites(),
                warnings=adapter.warnings,
                invocation=adapter.invocation,
            )
        with self._lock:
            existing = self.registry.existing(name, version)
            if existing is None:
                self.registry.add(record)
            # under the lock: a removal comes wholly before or after, so no shard loads what it was told to drop
            loads = [self._load_on(handle, existing or record) for handle in self.shards.live().values()]
        for warning in record.warnings:
            log.warning("adapter", name=name, warning=warning)
        return existing or record, loads, existing is None

    def register_directory(self, found: dict[str, Path]) -> None:
        """The start-up adapters. One that is refused is reported by /readyz, and to who asks for it."""
        for name, path in found.items():
            try:
                self.register(name, str(path))
            except (AdapterError, OSError) as error:
                log.error("adapter refused", name=name, error=str(error))
                with self._lock:
                    self.registry.refused[name] = str(error)
        self.adapters_registered.set()

    def _load_on(self, handle: ShardHandle, record: Record) -> PendingCommand:
        def loaded(error: LoraServerError | None) -> None:
            if error is None:
                record.loaded.add(handle.shard)
                record.error = ""
            elif record.listed and not isinstance(error, ShardUnavailableError):  # a successor loads it again
                record.error = str(error)
                log.error("adapter failed to load", name=record.name, shard=handle.shard, error=str(error))

        load = pb.Load(handle=record.handle, path=record.path, version=record.version, stamp=record.stamp)
        return handle.send(pb.ShardCommand(load=load), loaded)

    def add(self, name: str, uri: str, seconds: float) -> Record:
        """Register and wait until every shard has it; takes it back if one cannot load it."""
        self.shards.require_up()
        record, loads, new = self.register(name, uri)
        try:
            wait_all(loads, seconds, f"loading {name!r}")
        except LoraServerError:
            if new:
                self.remove(name)
            raise
        return record

    def remove(self, name: str) -> int:
        """Unlist at once; weights go with the last holder. Returns how many hold it now."""
        with self._lock:
            if self.registry.refused.pop(name, None) is not None:
                return 0
            record, free = self.registry.unlist(name)
            holders = len(+record.holders)
        self._drop(free)
        return holders

    def _drop(self, handles: list[int]) -> None:
        for handle in handles:
            self.shards.broadcast(pb.ShardCommand(drop=handle))

    def on_layers_ready(self, shard: int, report: pb.LayersReady) -> None:
        """A shard has that many layers of an adapter."""
        with self._lock:
            record = self.registry.by_handle(report.handle)
            if record is not None:
                record.layers[shard] = report.layers

    def records(self) -> list[tuple[Record, int]]:
        """Every adapter, by name, with the number of clients that hold it."""
        with self._lock:
            records = sorted(self.registry.records(), key=lambda record: record.name)
            return [(record, len(+record.holders)) for record in records]

    def record(self, name: str) -> tuple[Record, int]:
        """One listed adapter and how many clients hold it; UnknownAdapterError says why there is none."""
        with self._lock:
            record = self.registry.get(name)
            return record, len(+record.holders)

    def resident_layers(self, record: Record) -> int:
        """Layers that all their shards have."""
        layout, total = self.agreement.layout, 0
        for stage in range(layout.pp):
            owning = [s for s in layout.stage_shards(stage) if self.placement.layers(s)]
            total += min((record.layers.get(shard, 0) for shard in owning), default=0)
        return total

    # -- clients

    def join(self, instance: str) -> tuple[ClientLease, dict[int, ShardHandle]]:
        """A lease that every shard knows of. Raises ServerUnavailableError while a shard is not up."""
        live = self.shards.require_up()
        lease = self.leases.grant(instance)
        grant = pb.Grant(client=lease.client, epoch=lease.epoch, key=lease.key)
        try:
            wait_all([handle.send(pb.ShardCommand(grant=grant)) for handle in live.values()], GRANT_SECONDS, "a grant")
        except LoraServerError:
            self.end_lease(lease.client, lease.epoch)
            raise
        log.info("client joined", client=lease.client, instance=instance)
        return lease, live

    def end_lease(self, client: int, epoch: int) -> None:
        """The client left, died, or was silent: cut it off everywhere and let go of what it held."""
        if self.leases.end(client, epoch):
            self._forget(client)

    def _forget(self, client: int) -> None:
        self.shards.broadcast(pb.ShardCommand(revoke=client))
        with self._lock:
            free = self.registry.forget_client(client)
        self._drop(free)
        log.info("client gone", client=client)

    def expire_leases(self) -> None:
        """Called about once a second."""
        for lease in self.leases.take_expired():
            log.warning("lease expired", client=lease.client, instance=lease.instance)
            self._forget(lease.client)

    def acquire(self, client: int, epoch: int, names: list[str]) -> list[Record]:
        """Hold adapters for a client; raises UnknownAdapterError, LeaseError."""
        self.leases.renew(client, epoch)
        with self._lock:
            return self.registry.acquire(client, names)

    def release(self, client: int, epoch: int, handles: list[int]) -> None:
        """Let go of adapters; raises LeaseError."""
        self.leases.renew(client, epoch)
        with self._lock:
            free = self.registry.release(client, handles)
        self._drop(free)

    def prefetch(self, handles: list[int]) -> None:
        """Pass a client's signal on."""
        self.shards.broadcast(pb.ShardCommand(prefetch=pb.Handles(handles=handles)))

    # -- shards

    def shard_arrived(self, registration: pb.Registration) -> ShardHandle:
        """A shard process registered: give it what all must have. Raises ConfigError if it disagrees."""
        layout = self.agreement.layout
        if registration.agreement != self.agreement.digest() or registration.shard >= layout.num_shards:
            raise ConfigError(
                f"shard {registration.shard} of node {registration.node}: started with other settings than "
                f"the controller's ({self.agreement.describe()}); start every node with the same model and flags"
            )
        handle = ShardHandle(registration)
        with self._lock:
            self.shards.arrive(handle)  # first: one that is turned away must not touch what the live one has
            for record in self.registry.records():
                record.layers.pop(registration.shard, None)
                record.loaded.discard(registration.shard)
                self._load_on(handle, record)
        if self.agreement.coordination == "leader":
            self._introduce(handle)
        log.info("shard up", shard=registration.shard, node=registration.node, pid=registration.pid)
        return handle

    def _introduce(self, arrived: ShardHandle) -> None:
        """Leader mode: a leader that arrives is followed by its stage; a follower follows its leader."""
        layout, shard = self.agreement.layout, arrived.shard
        leader_index = layout.stage(shard) * layout.ep
        stage = {s: h for s, h in self.shards.live().items() if layout.stage(s) == layout.stage(shard)}
        leader = stage.pop(leader_index, None)
        if leader is None:
            return
        for follower in stage.values() if shard == leader_index else [arrived]:
            follower.send(pb.ShardCommand(follow=leader.registration.order_address))

    def shard_departed(self, handle: ShardHandle) -> None:
        """A shard's stream ended."""
        if self.shards.depart(handle):
            level = log.info if self.shards.closed else log.error
            level(
                "shard lost",
                shard=handle.shard,
                node=handle.node,
                pid=handle.pid,
            )

    def not_ready(self) -> str:
        """Why /readyz says no; empty if it says yes."""
        missing = self.shards.missing()
        if missing:
            return f"shards not up: {missing}"
        if not self.adapters_registered.is_set():
            return "adapters are still being registered"
        with self._lock:
            refused = dict(self.registry.refused)
        return "; ".join(f"adapter {name!r} was refused: {why}" for name, why in refused.items())
