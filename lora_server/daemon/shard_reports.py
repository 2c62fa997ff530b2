"""Reports of a shard to its controller: counters twice a second, and residency as soon as it changes."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

from lora_server.errors import AdapterSourceError
from lora_server.memory.entry import NEVER
from lora_server.memory.report import AdapterResidency
from lora_server.shard.coordination import StageRole
from lora_server.shard.device_host import DeviceShardHost
from lora_server.shard.loop import Shard
from lora_server.sources.fetch import Fetcher
from lora_server.timings import DEFAULTS, Timings
from lora_server.transport.base import Port
from lora_server.wire import lora_server_pb2 as pb
from lora_server.wire.waits import phase_stats


class ShardReports:
    """Sends a shard's counters, and changes of its adapters' residency. Thread-safe."""

    def __init__(
        self,
        shard: Shard | DeviceShardHost,
        port: Port,
        coordinator: StageRole,
        fetcher: Fetcher,
        report: Callable[[pb.ShardReport], None],
        timings: Timings = DEFAULTS,
    ) -> None:
        self._shard, self._store, self._port, self._coordinator = shard, shard.store, port, coordinator
        self._fetcher, self._report, self._timings = fetcher, report, timings
        self._reporting = threading.Lock()  # changes are reported in the order in which they were taken

    def moved(self) -> None:
        """Report the adapters that were loaded or evicted since the last call."""
        with self._reporting:
            moved = [_residency(one) for one in self._store.report.take_changes()]
            if moved:
                self._report(pb.ShardReport(residencies=pb.Residencies(moved=moved)))

    def follow(self, layers_moved: threading.Event, stopping: threading.Event) -> None:
        """Report residency as layers are loaded, until `stopping` is set."""
        while not stopping.wait(self._timings.residency_report):
            if layers_moved.wait(self._timings.shard_report):
                layers_moved.clear()
                self.moved()

    def run(self, stopping: threading.Event) -> None:
        """Report residency and counters until `stopping` is set."""
        while not stopping.wait(self._timings.shard_report):
            self._store.adapters.note_disk(self._fetcher.cache.versions())
            self._tidy_disk()
            self.moved()
            connections = self._port.connections
            stats = pb.ShardStats(
                **vars(self._shard.counters),
                **self._store.report.use()._asdict(),
                device=self._store.tier.name,
                clients=len(connections),
                followers=self._coordinator.followers,
                phases=phase_stats(self._shard.phases),
                tenants=[
                    pb.TenantStats(tenant=tenant, **vars(one)) for tenant, one in self._shard.by_tenant.all().items()
                ],
                load_times=phase_stats(self._store.report.load_times.items()),
                disk=pb.DiskStats(**self._fetcher.use()._asdict()),
                attached=[pb.Attached(client=one.grant.client, transport=one.transport) for one in connections],
            )
            self._report(pb.ShardReport(stats=stats))

    def _tidy_disk(self) -> None:
        """Delete cached files from node 0 that no shard of this node needs any more."""
        for version in self._store.report.take_unneeded():
            with contextlib.suppress(AdapterSourceError, OSError):  # files that cannot be deleted now are evicted later
                self._fetcher.cache.discard(version)


def _residency(one: AdapterResidency) -> pb.Residency:
    told = pb.Residency(
        handle=one.handle,
        layers=one.ready,
        host_layers=one.packed,
        bytes=one.nbytes,
        measured=one.measured,
        remote=one.remote,
        coming=one.loading,
    )
    if one.seconds < NEVER:
        told.expected_us = int(one.seconds * 1e6)
    if one.error is not None:
        told.error_code, told.error = one.error.code, str(one.error)
    return told
