"""The server's Prometheus metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector

from lora_server.access.tls import ServerCertificate
from lora_server.control.admission.queue import AdmissionQueue
from lora_server.control.admission.tally import Tally
from lora_server.control.controller import Controller
from lora_server.control.reports.build import build_info, certificate_expiry, leader_metrics
from lora_server.control.reports.durations import Durations, durations
from lora_server.control.reports.metrics_disk import disk_metrics
from lora_server.control.reports.metrics_tenant import request_waits, tenant_metrics
from lora_server.control.resize import OUTCOMES
from lora_server.errors import AdapterFormatError, AdmissionError
from lora_server.wire import lora_server_pb2 as pb

STATES = ("remote", "disk", "host", "loading", "ready", "failed", "draining")  # of an adapter

# metric, help, field of ShardStats, factor
_COUNTERS = (
    ("lora_server_steps", "Steps served", "steps", 1.0),
    ("lora_server_failed_steps", "Steps answered with an error", "failed", 1.0),
    ("lora_server_entries", "Rows times experts computed", "entries", 1.0),
    ("lora_server_request_bytes", "Bytes of requests served", "request_bytes", 1.0),
    ("lora_server_response_bytes", "Bytes of responses pushed", "response_bytes", 1.0),
    ("lora_server_wait_seconds", "Time steps waited on their shard", "wait_ns", 1e-9),
    ("lora_server_compute_seconds", "Time shards computed", "compute_ns", 1e-9),
    ("lora_server_loads", "Adapters brought into the device pool", "loads", 1.0),
    ("lora_server_loaded_bytes", "Bytes brought into the device pool", "loaded_bytes", 1.0),
    ("lora_server_preloads", "Adapters brought into idle memory before anybody asked", "preloads", 1.0),
    ("lora_server_preload_hits", "Of these, those that were used", "preload_hits", 1.0),
    ("lora_server_evictions", "Adapters that made room in the device pool", "evictions", 1.0),
)
# metric, help, fields of ShardStats for the device pool and for the host pool
_POOLS = (
    ("lora_server_weight_bytes", "Bytes that adapters take of a pool", "weight_bytes", "host_bytes"),
    ("lora_server_pool_bytes", "Bytes of a pool", "total_bytes", "host_total_bytes"),
)


class ControllerCollector(Collector):
    """The controller's state as Prometheus metrics, made when asked for."""

    def __init__(self, controller: Controller, certificate: ServerCertificate | None = None) -> None:
        self._controller, self._certificate = controller, certificate
        self.refusals: Mapping[str, int] = {}  # of calls, by the error's code

    def collect(self) -> Iterable[Metric]:
        """Yield one family per quantity. Most are labelled by shard; `lora_server_shard_info` maps shards to stages and
        nodes."""
        controller = self._controller
        reported = {shard: handle.stats for shard, handle in controller.shards.live().items()}  # one report of each
        layout = controller.agreement.layout
        yield build_info(controller.agreement.spec, str(layout), layout.replicas)
        ready = not controller.not_ready()
        yield certificate_expiry(self._certificate)
        yield GaugeMetricFamily("lora_server_ready", "1 where /readyz says yes", float(ready))
        yield from leader_metrics(True, controller.start.leader_epoch)
        yield _shard_info(controller)
        missing = set(controller.shards.missing())
        up = GaugeMetricFamily("lora_server_shard_up", "1 where the shard serves", labels=["shard"])
        restarts = CounterMetricFamily("lora_server_shard_restarts", "Restarts of a shard", labels=["shard"])
        for shard, rank in controller.shards.ranks.items():
            up.add_metric([str(shard)], float(shard not in missing))
            restarts.add_metric([str(shard)], max(0, rank.restarts))
        degraded = GaugeMetricFamily(
            "lora_server_degraded_shards", "Shards that are down while their twins serve", len(controller.degraded)
        )
        yield from (up, restarts, degraded)
        yield GaugeMetricFamily(
            "lora_server_placement_generation", "Generation of the placement", controller.shards.generation
        )
        resizes = CounterMetricFamily("lora_server_resizes", "Resizes, by how they ended", labels=["outcome"])
        for outcome in OUTCOMES:
            resizes.add_metric([outcome], controller.resize.outcomes[outcome])
        yield resizes
        for name, text, device, host in _POOLS:
            pool = GaugeMetricFamily(name, text, labels=["shard", "tier"])
            for shard, stats in reported.items():
                pool.add_metric([str(shard), "device"], getattr(stats, device))
                pool.add_metric([str(shard), "host"], getattr(stats, host))
            yield pool
        for name, text, field, factor in _COUNTERS:
            family = CounterMetricFamily(name, text, labels=["shard"])
            for shard, stats in reported.items():
                family.add_metric([str(shard)], getattr(stats, field) * factor)
            yield family
        text = "Time of steps at their shard, by phase"
        yield durations("lora_server_step_seconds", text, ["shard", "phase"], _of_shards(reported, "phases"))
        text = "Time from when an adapter got its memory until it was whole, by where it came from"
        yield durations("lora_server_load_seconds", text, ["shard", "tier"], _of_shards(reported, "load_times"))
        ignored = CounterMetricFamily("lora_server_prefetches_ignored", "Prefetches ignored, by why", labels=["why"])
        for why, times in sorted(controller.clients.prefetches.ignored.items()):
            ignored.add_metric([why], times)
        yield ignored
        yield GaugeMetricFamily("lora_server_clients", "Clients that hold a lease", len(controller.clients.leases))
        yield GaugeMetricFamily(
            "lora_server_adapters", "Adapters registered", len(controller.adapters.catalog.records())
        )
        yield _states(controller)
        yield from _admission(controller.adapters.admission.queue)
        yield _holds(controller.adapters.admission.tally)
        yield from disk_metrics(controller)
        yield from tenant_metrics(reported, controller.adapters.admission.queue.counters)
        yield request_waits(controller.clients.waits)
        refusals = CounterMetricFamily("lora_server_refusals", "Calls that were refused, by the error", labels=["code"])
        for code, count in {AdmissionError.code: 0, **self.refusals}.items():  # there from the start, for alerts
            refusals.add_metric([code], count)
        yield refusals
        help_text = "Adapters of --adapters that are refused, by the error's code"
        refused = GaugeMetricFamily("lora_server_adapters_refused", help_text, labels=["code"])
        codes = Counter({AdapterFormatError.code: 0})  # there from the start, for alerts
        codes.update(one.code for one in controller.adapters.catalog.refusals.listed())
        for code, count in codes.items():
            refused.add_metric([code], count)
        yield refused


def _of_shards(reported: Mapping[int, pb.ShardStats], field: str) -> Durations:
    each = ((shard, one) for shard, stats in reported.items() for one in getattr(stats, field))
    return (([str(shard), one.phase], one.counts, one.sum_ns) for shard, one in each)


def _admission(queue: AdmissionQueue) -> Iterable[Metric]:
    counters = queue.counters
    hits, misses, waits, loads = counters.hits, counters.misses, counters.waits, counters.loads
    admitted = CounterMetricFamily("lora_server_admissions", "Requests that got their adapters", labels=["kind"])
    admitted.add_metric(["immediate"], counters.immediate)
    admitted.add_metric(["queued"], counters.queued)
    of_class = "Time that requests with an SLO class waited until they were admitted; at once: 0"
    waited = "Time that queued requests waited until they were admitted"
    loaded = "Time that admitted requests waited until their adapters were loaded"
    yield from (
        admitted,
        durations("lora_server_admission_wait_seconds", waited, [], [([], waits.counts, waits.sum_ns)]),
        durations("lora_server_weights_wait_seconds", loaded, [], [([], loads.counts, loads.sum_ns)]),
        durations(
            "lora_server_class_wait_seconds",
            of_class,
            ["slo_class"],
            (([name], one.counts, one.sum_ns) for name, one in list(counters.waits_by_class.items())),
        ),
        CounterMetricFamily("lora_server_adapter_hits", "Adapters that were whole in device pools when held", hits),
        CounterMetricFamily("lora_server_adapter_misses", "Adapters that were not", misses),
        GaugeMetricFamily("lora_server_admission_queue", "Requests that wait for a place", len(queue.tickets.waiting)),
        GaugeMetricFamily("lora_server_weights_queue", "Requests that wait for weights", len(queue.tickets.loading)),
        GaugeMetricFamily("lora_server_active_adapters", "Adapters that clients hold", len(queue.capacity.active)),
    )


def _holds(tally: Tally) -> Metric:
    text = "Time that requests held an adapter; (other): those without a line of their own"
    held = SummaryMetricFamily("lora_server_adapter_hold_seconds", text, labels=["adapter"])
    own, others = tally.sums()
    for name, sums in (*own.items(), ("(other)", others)):
        held.add_metric([name], sums.holds, sums.seconds)
    return held


def _shard_info(controller: Controller) -> Metric:
    layout = controller.agreement.layout
    labels = ["shard", "stage", "ep_rank", "node", "device"]
    info = GaugeMetricFamily("lora_server_shard_info", "1; where a shard that is up stands and runs", labels=labels)
    for shard, handle in controller.shards.live().items():
        place = shard, layout.stage(shard), layout.ep_rank(shard), handle.node
        info.add_metric([*map(str, place), handle.stats.device], 1)
    return info


def _states(controller: Controller) -> Metric:
    counts = controller.adapters.listings.states()
    states = GaugeMetricFamily("lora_server_adapters_in_state", "Adapters by state", labels=["state"])
    for state in STATES:
        states.add_metric([state], counts[state])
    return states
