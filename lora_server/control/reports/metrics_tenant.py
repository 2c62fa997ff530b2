"""Prometheus metrics by tenant: which tenant is slow, and which one takes the shards' time from the others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client.core import CounterMetricFamily, Metric

from lora_server.control.admission.queue import AdmissionCounters
from lora_server.control.reports.durations import durations
from lora_server.per_tenant import PerTenant
from lora_server.wire import lora_server_pb2 as pb
from lora_server.wire.waits import WaitHistograms

# metric, help, fields of TenantStats, factor
_COUNTERS = (
    ("lora_server_tenant_steps", "Steps served", ("steps",), 1.0),
    ("lora_server_tenant_failed_steps", "Steps answered with an error", ("failed",), 1.0),
    ("lora_server_tenant_step_wait_seconds", "Time steps waited on their shard", ("wait_ns",), 1e-9),
    ("lora_server_tenant_compute_seconds", "Time shards computed", ("compute_ns",), 1e-9),
    ("lora_server_tenant_step_bytes", "Bytes of requests and responses", ("request_bytes", "response_bytes"), 1.0),
)


def request_waits(waits: PerTenant[WaitHistograms]) -> Metric:
    """Return how long requests waited for what, as their engines say."""
    return durations(
        "lora_server_request_wait_seconds",
        "Time that requests waited for a name, a place, weights, and their engine, by the tenant of that engine",
        ["tenant", "what"],
        (
            ([tenant, what], one.counts, one.sum_ns)
            for tenant, own in waits.all().items()
            for what, one in own.of.items()
        ),
    )


def tenant_metrics(reported: Mapping[int, pb.ShardStats], counters: AdmissionCounters) -> Iterable[Metric]:
    """Yield how long each tenant's requests waited, and what the steps of its engines took of each shard."""
    waits = {"place": counters.waits_by_tenant.all(), "weights": counters.loads_by_tenant.all()}
    yield durations(
        "lora_server_tenant_wait_seconds",
        "Time that a tenant's requests waited for a place, at once included, and then for weights",
        ["tenant", "what"],
        (([tenant, what], one.counts, one.sum_ns) for what, own in waits.items() for tenant, one in own.items()),
    )
    for name, text, fields, factor in _COUNTERS:
        family = CounterMetricFamily(name, f"{text}, by the tenant of their engine", labels=["shard", "tenant"])
        for shard, stats in reported.items():
            for one in stats.tenants:
                family.add_metric([str(shard), one.tenant], factor * sum(getattr(one, field) for field in fields))
        yield family
