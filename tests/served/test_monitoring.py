"""What deploy/monitoring asks Prometheus for is what a server says at /metrics: every name, every label."""

import re
import urllib.request
from pathlib import Path

import promql_parser
import pytest
import torch
import yaml
from prometheus_client.parser import text_string_to_metric_families

from client_connector.transformers import attach
from deploy.monitoring import dashboard
from lora_server.demo.launch import running_server
from tests.support.serving import HANG_SECONDS, until
from tests.support.workload import workload

FOLDER = Path(dashboard.__file__).parent
RULES = yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"][0]["rules"]
ELSEWHERE = {"up": {"job", "instance"}}  # Prometheus's own


def queries():
    """(where, query, labels that its legend or text needs)"""
    for panel in dashboard.dashboard()["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"], set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
    for rule in RULES:
        text = " ".join(rule["annotations"].values())
        yield rule["alert"], rule["expr"], set(re.findall(r"\$labels\.(\w+)", text))


@pytest.fixture(scope="module")
def scrape(tmp_path_factory):
    """Sample name -> label names, and (sample name, label values) -> value, of a server that has served."""
    load = workload("mixtral")
    flags = ["--base-model", str(load.base), "--adapters", str(load.adapters)]
    with running_server(tmp_path_factory.mktemp("server") / "log", flags) as server:
        with attach(load.model, server=server.address) as lora, lora.adapters([sorted(load.paths)[0]]):
            load.model(torch.tensor([load.batch[0].prompt]))
        found, samples = {}, {}

        def scraped():
            with urllib.request.urlopen(f"http://{server.http}/metrics", timeout=HANG_SECONDS) as answer:
                for family in text_string_to_metric_families(answer.read().decode()):
                    for sample in family.samples:
                        found.setdefault(sample.name, set()).update(sample.labels)
                        samples[sample.name, *sorted(sample.labels.values())] = sample.value
            counted = samples.get(("lora_server_step_seconds_count", "0", "compute"), 0)
            if not counted or counted != samples["lora_server_steps_total", "0"]:
                return False
            return "lora_server_adapter_hold_seconds_count" in found

        until(scraped, "the hold was counted")
    return found, samples


@pytest.fixture(scope="module")
def exposed(scrape):
    return scrape[0] | ELSEWHERE


def test_the_operations_page_has_every_metric(exposed):
    """Each in a row of its own, with its labels."""
    text = (FOLDER.parent.parent / "docs/operations.md").read_text()
    rows = dict(re.findall(r"^\| `(lora_server_\w+)` \| ([\w, ]*) ?\|", text, re.MULTILINE))
    written = {name: set(re.findall(r"\w+", labels)) for name, labels in rows.items()}
    own = {name: labels - {"le"} for name, labels in exposed.items() if name not in ELSEWHERE}
    parts = {name: re.sub(r"_(bucket|sum|count)$", "", name) for name in own}
    found = {whole if f"{whole}_sum" in own else name: own[name] for name, whole in parts.items()}
    assert written == found


def test_what_happened_is_counted(scrape):
    _, samples = scrape
    acquired = samples["lora_server_adapter_hits_total",] + samples["lora_server_adapter_misses_total",]
    assert acquired == samples["lora_server_admissions_total", "immediate"] == 1
    loads = sum(samples["lora_server_load_seconds_count", "0", tier] for tier in ("disk", "host"))
    assert loads == samples["lora_server_loads_total", "0"] > 0
    assert samples["lora_server_load_seconds_sum", "0", "disk"] > 0
    assert samples["lora_server_admission_wait_seconds_bucket", "+Inf"] == 0


def test_a_query_asks_for_what_is_exposed(exposed):
    for where, query, legend in queries():
        query = query.replace("$__rate_interval", "5m")
        promql_parser.parse(query)
        names = set(re.findall(r"\b(?:lora_server_\w+|up)\b", query))
        assert names and not names - set(exposed), (where, names - set(exposed))
        labels = set().union(*(exposed[name] for name in names))
        grouped = {label for group in re.findall(r"\bby \(([\w, ]+)\)", query) for label in re.split(r", *", group)}
        matched = set(re.findall(r"[{,]\s*(\w+)\s*[=!]~?", query))
        assert not (grouped | matched | legend) - labels, where


def test_alerts_say_what_to_do():
    assert all(rule["annotations"].keys() == {"summary", "what_to_do"} and rule["labels"]["severity"] for rule in RULES)
    assert len({rule["alert"] for rule in RULES}) == len(RULES)
