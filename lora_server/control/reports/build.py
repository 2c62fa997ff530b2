"""Which version serves what, as a Prometheus metric."""

from __future__ import annotations

from prometheus_client.core import InfoMetricFamily, Metric

from lora_server import __version__
from lora_server.placement import Layout


def build_info(model: str, layout: Layout) -> Metric:
    """Which version serves what."""
    labels = {"version": __version__, "model": model, "layout": str(layout)}
    return InfoMetricFamily("lora_server_build", "What runs here", labels)
