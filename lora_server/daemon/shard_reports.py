"""Reports of a shard to its controller: twice a second, and as soon as residency changes."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

from lora_server.errors import AdapterSourceError
from lora_server.shard.coordination import StageRole
from lora_server.shard.device_host import DeviceShardHost
from lora_server.shard.loop import Shard
from lora_server.sources.fetch import Fetcher
from lora_server.timings import Timings
from lora_server.transport.base import Port
from lora_server.wire import lora_server_pb2 as pb


class ShardReports:
    """Sends a shard's counters, and changes of its adapters' residency. Thread-safe."""

    def __init__(
        self,
        shard: Shard | DeviceShardHost,
        port: Port,
        coordinator: StageRole,
        fetcher: Fetcher,
        report: Callable[[pb.ShardReport], None],
        seconds: float = Timings.shard_report,
    ) -> None:
        self._shard, self._store, self._port, self._coordinator = shard, shard.store, port, coordinator
        self._fetcher, self._report, self._seconds = fetcher, report, seconds
        self._reporting = threading.Lock()  # changes are reported in the order in which they were taken

    def moved(self) -> None:
        """Report the adapters that were loaded or evicted since the last call."""
        with self._reporting:
            moved = [
                pb.Residency(handle=h, layers=r, host_layers=p, bytes=n, measured=m, remote=f, coming=c)
                for h, r, p, n, m, f, c in self._store.report.take_changes()
            ]
            if moved:
                self._report(pb.ShardReport(residencies=pb.Residencies(moved=moved)))

    def run(self, stopping: threading.Event) -> None:
        """Report until `stopping` is set."""
        while not stopping.wait(self._seconds):
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
                phases=[pb.PhaseStats(phase=p, counts=h.counts, sum_ns=h.sum_ns) for p, h in self._shard.phases],
                load_times=[
                    pb.PhaseStats(phase=tier, counts=h.counts, sum_ns=h.sum_ns)
                    for tier, h in self._store.report.load_times.items()
                ],
                disk=pb.DiskStats(**self._fetcher.use()._asdict()),
                attached=[pb.Attached(client=one.client, transport=one.transport) for one in connections],
            )
            self._report(pb.ShardReport(stats=stats))

    def _tidy_disk(self) -> None:
        """Delete cached files from node 0 that no shard of this node needs any more."""
        for version in self._store.report.take_unneeded():
            with contextlib.suppress(AdapterSourceError, OSError):  # files that cannot be deleted now are evicted later
                self._fetcher.cache.discard(version)
