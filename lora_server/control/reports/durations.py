"""Histograms of durations as Prometheus metrics."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from prometheus_client.core import HistogramMetricFamily, Metric

from lora_server.histogram import BOUNDS_NS

Durations = Iterable[tuple[list[str], Sequence[int], int]]  # labels, counts, nanoseconds


def durations(name: str, text: str, labels: Sequence[str], durations: Durations) -> Metric:
    """Return a family of histograms, one per set of label values."""
    family = HistogramMetricFamily(name, text, labels=labels)
    bounds = [*(f"{bound * 1e-9:.6g}" for bound in BOUNDS_NS), "+Inf"]
    for values, counts, sum_ns in durations:
        buckets = list(zip(bounds, map(float, itertools.accumulate(counts)), strict=True))
        family.add_metric(values, buckets, sum_ns * 1e-9)
    return family
