"""Prometheus metrics of the nodes' disk caches, and of what their processes fetched."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from lora_server.control.controller import Controller
from lora_server.wire import lora_server_pb2 as pb

# metric, help, field of DiskStats
_CACHES = (
    ("lora_server_disk_cache_bytes", "Bytes that adapters from far take of a node's disk cache", "bytes"),
    ("lora_server_disk_cache_capacity_bytes", "Bytes that they may take", "total_bytes"),
)
_COUNTERS = (
    ("lora_server_fetches", "Adapters fetched from far", "fetches"),
    ("lora_server_fetched_bytes", "Bytes fetched from far", "fetched_bytes"),
    ("lora_server_fetch_seconds", "Time that fetches took", "fetch_seconds"),
    ("lora_server_fetch_failures", "Fetches that failed, after all their attempts", "fetch_failures"),
    ("lora_server_disk_evictions", "Adapters that made room in a disk cache", "evictions"),
)


def disk_metrics(controller: Controller) -> Iterable[Metric]:
    """Yield gauges of the disk caches, labelled by node, and counters of fetches, labelled by process."""
    live = controller.shards.live()
    processes = {f"shard {shard}": handle.stats.disk for shard, handle in live.items()}
    nodes = {handle.node: handle.stats.disk for handle in live.values()}
    if (fetcher := controller.adapters.files.fetcher) is not None:
        nodes[0] = processes["controller"] = pb.DiskStats(**fetcher.use()._asdict())
    for name, text, field in _CACHES:
        gauge = GaugeMetricFamily(name, text, labels=["node"])
        for node, disk in sorted(nodes.items()):
            gauge.add_metric([str(node)], getattr(disk, field))
        yield gauge
    for name, text, field in _COUNTERS:
        counter = CounterMetricFamily(name, text, labels=["process"])
        for process, disk in sorted(processes.items()):
            counter.add_metric([process], getattr(disk, field))
        yield counter
