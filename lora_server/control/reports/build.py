"""Prometheus metrics of every node: its version, what it serves, and its certificate's expiry."""

from __future__ import annotations

import math
from collections.abc import Iterable

from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily, Metric

from lora_server import __version__
from lora_server.access.tls import ServerCertificate
from lora_server.spec import ModelSpec


def build_info(spec: ModelSpec, layout: str, replicas: int) -> Metric:
    """Return the metric that names the version, the model, its geometry, the layout and how often it is there."""
    labels = {"version": __version__, "model": spec.name, "geometry": spec.geometry, "layout": layout}
    labels["replicas"] = str(replicas)
    return InfoMetricFamily("lora_server_build", "What runs here", labels)


def leader_metrics(leads: bool, epoch: int) -> Iterable[Metric]:
    """Yield the role of one of two controllers, and the epoch of the lead as it knows it."""
    yield GaugeMetricFamily("lora_server_leader", "1 where the controller leads, 0 where it stands by", float(leads))
    yield GaugeMetricFamily("lora_server_leader_epoch", "How often a controller took the lead", epoch)


def certificate_expiry(certificate: ServerCertificate | None) -> Metric:
    """Return the seconds until the served certificate expires; +Inf without TLS, so that alerts have a series."""
    left = certificate.seconds_left if certificate is not None else math.inf
    return GaugeMetricFamily(
        "lora_server_certificate_expiry_seconds", "Seconds until the TLS certificate expires; +Inf without TLS", left
    )
