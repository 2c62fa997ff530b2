"""Write dashboard.json, Grafana's, from the panels below: `python deploy/monitoring/dashboard.py`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

FILE = Path(__file__).parent / "dashboard.json"
WIDTH, HEIGHT = 24, 7
SOURCE = {"type": "prometheus", "uid": "${source}"}
RATE = "$__rate_interval"
CHOSEN = 'job=~"$job", instance=~"$instance"'  # by the variables at the top of the dashboard

# row -> panels: title, unit, width, {legend: query}
Panels = list[tuple[str, str, int, dict[str, str]]]
ROWS: dict[str, Panels] = {
    "Now": [
        ("Ready", "bool_yes_no", 3, {"": "lora_server_ready"}),
        ("Shards up", "none", 3, {"": "sum(lora_server_shard_up)"}),
        ("Adapters", "none", 3, {"": "lora_server_adapters"}),
        ("In use", "none", 3, {"": "lora_server_active_adapters"}),
        ("Engines", "none", 3, {"": "lora_server_clients"}),
        ("Requests that wait", "none", 3, {"": "lora_server_admission_queue"}),
        ("Steps", "ops", 3, {"": f"sum(rate(lora_server_steps_total[{RATE}]))"}),
        ("Refused", "none", 3, {"": "sum(lora_server_adapters_refused)"}),
    ],
    "Steps": [
        ("Steps by shard", "ops", 8, {"shard {{shard}}": f"rate(lora_server_steps_total[{RATE}])"}),
        (
            *("Where a step's time goes", "s", 8),
            {
                "compute, shard {{shard}}": f"rate(lora_server_compute_seconds_total[{RATE}]) "
                f"/ (rate(lora_server_steps_total[{RATE}]) > 0)",
                "wait, shard {{shard}}": f"rate(lora_server_wait_seconds_total[{RATE}]) "
                f"/ (rate(lora_server_steps_total[{RATE}]) > 0)",
            },
        ),
        (
            *("A slow step: the 99th percentile", "s", 8),
            {
                "{{phase}}": "histogram_quantile(0.99, sum by (le, phase) "
                f"(rate(lora_server_step_seconds_bucket[{RATE}])))"
            },
        ),
        ("Failed steps", "ops", 8, {"shard {{shard}}": f"rate(lora_server_failed_steps_total[{RATE}])"}),
        (
            "How busy shards are",
            "percentunit",
            8,
            {"shard {{shard}}": f"rate(lora_server_compute_seconds_total[{RATE}])"},
        ),
        (
            *("Bytes of steps", "Bps", 8),
            {
                "to shards": f"sum(rate(lora_server_request_bytes_total[{RATE}]))",
                "from shards": f"sum(rate(lora_server_response_bytes_total[{RATE}]))",
            },
        ),
    ],
    "Admission": [
        (
            *("Admitted at once", "percentunit", 8),
            {
                "": f'sum(rate(lora_server_admissions_total{{kind="immediate"}}[{RATE}])) '
                f"/ (sum(rate(lora_server_admissions_total[{RATE}])) > 0)"
            },
        ),
        (
            *("How long those that wait, wait", "s", 8),
            {
                "mean": f"rate(lora_server_admission_wait_seconds_sum[{RATE}]) "
                f"/ (rate(lora_server_admission_wait_seconds_count[{RATE}]) > 0)",
                "99th percentile": "histogram_quantile(0.99, sum by (le) "
                f"(rate(lora_server_admission_wait_seconds_bucket[{RATE}])))",
            },
        ),
        (
            *("What requests wait for: the 99th percentile", "s", 8),
            {
                "{{what}}": "histogram_quantile(0.99, sum by (le, what) "
                f"(rate(lora_server_request_wait_seconds_bucket[{RATE}])))"
            },
        ),
        (
            *("The most used adapters", "ops", 8),
            {"{{adapter}}": f"topk(10, rate(lora_server_adapter_hold_seconds_count[{RATE}]))"},
        ),
    ],
    "Tenants": [
        (
            *("How long a tenant's requests wait: the 95th percentile", "s", 8),
            {
                "{{tenant}}, for {{what}}": "histogram_quantile(0.95, sum by (le, tenant, what) "
                f"(rate(lora_server_tenant_wait_seconds_bucket[{RATE}])))"
            },
        ),
        (
            *("How long a tenant's steps wait", "s", 8),
            {
                "{{tenant}}": f"sum by (tenant) (rate(lora_server_tenant_step_wait_seconds_total[{RATE}])) "
                f"/ (sum by (tenant) (rate(lora_server_tenant_steps_total[{RATE}])) > 0)"
            },
        ),
        (
            *("Time that shards compute for a tenant", "percentunit", 8),
            {"{{tenant}}": f"sum by (tenant) (rate(lora_server_tenant_compute_seconds_total[{RATE}]))"},
        ),
        (
            *("Bytes of a tenant's steps", "Bps", 8),
            {"{{tenant}}": f"sum by (tenant) (rate(lora_server_tenant_step_bytes_total[{RATE}]))"},
        ),
        (
            *("A tenant's failed steps", "ops", 8),
            {"{{tenant}}": f"sum by (tenant) (rate(lora_server_tenant_failed_steps_total[{RATE}]))"},
        ),
    ],
    "Refusals": [
        ("Refused calls", "ops", 16, {"{{code}}": f"rate(lora_server_refusals_total[{RATE}])"}),
        ("Certificate: until it expires", "s", 8, {"": "lora_server_certificate_expiry_seconds"}),
    ],
    "Memory": [
        (
            *("Pools, of what they hold", "percentunit", 8),
            {"{{tier}}, shard {{shard}}": "lora_server_weight_bytes / (lora_server_pool_bytes > 0)"},
        ),
        (
            *("Hit rate: adapters that were there when asked for", "percentunit", 8),
            {
                "": f"rate(lora_server_adapter_hits_total[{RATE}]) / "
                f"(rate(lora_server_adapter_hits_total[{RATE}]) + rate(lora_server_adapter_misses_total[{RATE}]) > 0)"
            },
        ),
        (
            *("How long a load takes: the 95th percentile", "s", 8),
            {
                "from {{tier}}": "histogram_quantile(0.95, sum by (le, tier) "
                f"(rate(lora_server_load_seconds_bucket[{RATE}])))"
            },
        ),
        ("Adapters by state", "none", 8, {"{{state}}": "lora_server_adapters_in_state"}),
        (
            *("Loads and evictions", "ops", 8),
            {
                "loads, shard {{shard}}": f"rate(lora_server_loads_total[{RATE}])",
                "evictions, shard {{shard}}": f"rate(lora_server_evictions_total[{RATE}])",
            },
        ),
        ("Bytes loaded", "Bps", 8, {"shard {{shard}}": f"rate(lora_server_loaded_bytes_total[{RATE}])"}),
        (
            *("Disk caches", "percentunit", 8),
            {"node {{node}}": "lora_server_disk_cache_bytes / (lora_server_disk_cache_capacity_bytes > 0)"},
        ),
        (
            *("Fetches from far", "ops", 8),
            {
                "{{process}}": f"rate(lora_server_fetches_total[{RATE}])",
                "failed, {{process}}": f"rate(lora_server_fetch_failures_total[{RATE}])",
            },
        ),
    ],
    "Deaths": [
        ("Restarts within an hour", "none", 24, {"shard {{shard}}": "increase(lora_server_shard_restarts_total[1h])"}),
    ],
}


def dashboard() -> dict[str, Any]:
    """Return the dashboard as Grafana imports it."""
    panels: list[dict[str, Any]] = []
    y = 0
    for row, content in ROWS.items():
        panels.append(_placed({"type": "row", "title": row, "collapsed": False, "panels": []}, 0, y, WIDTH, 1, panels))
        x, y = 0, y + 1
        height = 4 if row == "Now" else HEIGHT
        for title, unit, width, queries in content:
            if x + width > WIDTH:
                x, y = 0, y + height
            panels.append(_placed(_panel(title, unit, queries, row == "Now"), x, y, width, height, panels))
            x += width
        y += height
    source = {"name": "source", "type": "datasource", "query": "prometheus", "label": "Prometheus", "hide": 0}
    job = _variable("job", "lora_server_ready", "Job")
    instance = _variable("instance", 'lora_server_ready{job=~"$job"}', "Server")
    return {
        "title": "lora-server",
        "uid": "lora-server",
        "tags": ["lora-server"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [source, job, instance]},
        "panels": panels,
    }


def _variable(label: str, of: str, shown: str) -> dict[str, Any]:
    """A choice among a label's values, with several servers of one Prometheus; at first all of them."""
    query = f"label_values({of}, {label})"
    more = {"multi": True, "includeAll": True, "allValue": ".*", "current": {"text": "All", "value": "$__all"}}
    return {"name": label, "type": "query", "label": shown, "query": query, "datasource": SOURCE, "refresh": 2} | more


def _chosen(query: str) -> str:
    """Restrict every metric of a query to the chosen servers."""
    restricted = re.sub(r"\b(lora_server_\w+)(?!\w|{)", rf"\1{{{CHOSEN}}}", query)
    return re.sub(r"\b(lora_server_\w+){(?!job=)", rf"\1{{{CHOSEN}, ", restricted)


def _placed(panel: dict[str, Any], x: int, y: int, width: int, height: int, before: list[Any]) -> dict[str, Any]:
    return panel | {"id": len(before) + 1, "gridPos": {"x": x, "y": y, "w": width, "h": height}}


def _panel(title: str, unit: str, queries: dict[str, str], is_number: bool) -> dict[str, Any]:
    targets = [
        {"refId": chr(ord("A") + i), "expr": _chosen(query), "legendFormat": legend or title, "datasource": SOURCE}
        for i, (legend, query) in enumerate(queries.items())
    ]
    kind = {"type": "stat", "options": {"colorMode": "none"}} if is_number else {"type": "timeseries"}
    defaults = {"unit": unit, "min": 0}
    return kind | {
        "title": title,
        "datasource": SOURCE,
        "targets": targets,
        "fieldConfig": {"defaults": defaults, "overrides": []},
    }


if __name__ == "__main__":
    FILE.write_text(json.dumps(dashboard(), indent=1) + "\n")
