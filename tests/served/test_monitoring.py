"""What a server says at its HTTP port: the metrics that deploy/monitoring asks for, and a page for browsers."""

import contextlib
import http.client
import json
import re
from pathlib import Path

import promql_parser
import pytest
import torch
import yaml
from prometheus_client.parser import text_string_to_metric_families

from client_connector.serving.leases import AdapterLeases
from client_connector.serving.settings import Settings
from client_connector.transformers import attach
from deploy.monitoring import dashboard
from lora_server.access.store import Store, Tenant
from lora_server.demo.launch import running_server
from lora_server.registry.database import FILE, Database
from tests.support.browser import look, needs_browser, opened
from tests.support.serving import HANG_SECONDS, cli, flags, status, until
from tests.support.workload import workload

FOLDER = Path(dashboard.__file__).parent
RULES = yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"][0]["rules"]
OWN = "acme/law"
FILES = {"/": "text/html", "/page.css": "text/css", "/page.js": "text/javascript", "/status.json": "application/json"}
ELSEWHERE = {"up": {"job", "instance"}}  # Prometheus's own


TITLES = {panel["title"] for panel in dashboard.dashboard()["panels"]}


def queries():
    """(where, query, labels that its legend or text needs)"""
    for panel in dashboard.dashboard()["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"], set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
    for rule in RULES:
        text = " ".join(rule["annotations"].values())
        yield rule["alert"], rule["expr"], set(re.findall(r"\$labels\.(\w+)", text))


@pytest.fixture(scope="module")
def life(tmp_path_factory):
    """A server, and its metrics once it had served one request: sample name -> label names, and (sample name, label
    values) -> value."""
    load, data = workload("mixtral"), tmp_path_factory.mktemp("data")
    name = min(load.paths)
    with contextlib.closing(Database(f"sqlite:///{data / FILE}")) as database:
        Store(database).set_tenant(Tenant("acme"))
    (classes := data / "classes.yaml").write_text("gold: {slo: 'ttft_p99=1s,tpot_avg=100ms', adapters: ['*']}")
    more = ("--layout", "ep2-pp2", "--data-dir", str(data), "--adapter-root", str(load.adapters))
    more += ("--classes", str(classes))
    with running_server(tmp_path_factory.mktemp("server") / "log", flags(load, *more)) as server:
        with attach(load.model, server=server.address) as lora, lora.adapters([name]):
            load.model(torch.tensor([load.batch[0].prompt]))
        with contextlib.closing(AdapterLeases(Settings(server.address), lambda text: ())) as leases:
            leases.hold("one", name, ())
            until(lambda: leases.is_ready("one"), "it is held")
            leases.release("one")
            until(lambda: "lora_server_request_wait_seconds_count" in server.get("/metrics")[1], "a heartbeat told it")
        found, samples = {}, {}

        def scraped():
            for family in text_string_to_metric_families(server.get("/metrics")[1]):
                for sample in family.samples:
                    found.setdefault(sample.name, set()).update(sample.labels)
                    samples[sample.name, *sorted(sample.labels.values())] = sample.value
            counted = samples.get(("lora_server_step_seconds_count", "0", "compute"), 0)
            if not counted or counted != samples["lora_server_steps_total", "0"]:
                return False
            return "lora_server_adapter_hold_seconds_count" in found

        until(scraped, "the hold was counted")
        added = cli("adapters", "add", OWN, str(load.paths[name]), "--server", server.address)
        assert added.returncode == 0, added.stderr
        yield server, found, samples


@pytest.fixture
def server(life):
    return life[0]


@pytest.fixture
def exposed(life):
    return life[1] | ELSEWHERE


def test_the_operations_page_has_every_metric(exposed):
    """Each in a row of its own, with its labels."""
    text = (FOLDER.parent.parent / "docs/operations.md").read_text()
    rows = dict(re.findall(r"^\| `(lora_server_\w+)` \| ([\w, ]*) ?\|", text, re.MULTILINE))
    written = {name: set(re.findall(r"\w+", labels)) for name, labels in rows.items()}
    own = {name: labels - {"le"} for name, labels in exposed.items() if name not in ELSEWHERE}
    parts = {name: re.sub(r"_(bucket|sum|count)$", "", name) for name in own}
    found = {whole if f"{whole}_sum" in own else name: own[name] for name, whole in parts.items()}
    assert written == found


def test_what_happened_is_counted(life):
    *_, samples = life
    acquired = samples["lora_server_adapter_hits_total",] + samples["lora_server_adapter_misses_total",]
    assert acquired == samples["lora_server_admissions_total", "immediate"] == 2
    for what in ("name", "place", "weights", "engine"):
        assert samples["lora_server_request_wait_seconds_count", "(operator)", what] == 1
    assert samples["lora_server_request_wait_seconds_sum", "(operator)", "name"] > 0
    assert samples["lora_server_request_wait_seconds_sum", "(operator)", "place"] == 0
    loads = sum(samples["lora_server_load_seconds_count", "0", tier] for tier in ("disk", "host"))
    assert loads == samples["lora_server_loads_total", "0"] > 0
    assert samples["lora_server_load_seconds_sum", "0", "disk"] > 0
    assert samples["lora_server_admission_wait_seconds_bucket", "+Inf"] == 0
    assert samples["lora_server_class_wait_seconds_bucket", "+Inf", "gold"] == 2
    assert samples["lora_server_tenant_wait_seconds_count", "(operator)", "place"] == 2
    for name in ("steps", "failed_steps", "compute_seconds"):
        whole, own = (f"lora_server_{of}{name}_total" for of in ("", "tenant_"))
        tenant = [samples.get((own, "(operator)", shard), 0) for shard in "0123"]  # has no line before its first step
        assert tenant == [samples[whole, shard] for shard in "0123"]


def test_a_query_asks_for_what_is_exposed(exposed):
    for where, query, legend in queries():
        query = query.replace("$__rate_interval", "5m")
        promql_parser.parse(query)
        chosen = query.count('job=~"$job", instance=~"$instance"')
        assert chosen == (len(re.findall(r"\blora_server_", query)) if where in TITLES else 0), query
        names = set(re.findall(r"\b(?:lora_server_\w+|up)\b", query))
        assert names and not names - set(exposed), (where, names - set(exposed))
        labels = set().union(*(exposed[name] for name in names))
        grouped = {label for group in re.findall(r"\bby \(([\w, ]+)\)", query) for label in re.split(r", *", group)}
        matched = set(re.findall(r"[{,]\s*(\w+)\s*[=!]~?", query))
        assert not (grouped | matched | legend) - labels - ELSEWHERE["up"], where


# ---- the page


def get(server, path):
    with contextlib.closing(http.client.HTTPConnection(server.http, timeout=HANG_SECONDS)) as connection:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer, answer.read()


@pytest.mark.parametrize("path", FILES)
def test_files_come_from_here_alone(server, path):
    answer, content = get(server, path)
    assert (answer.status, answer.headers["Content-Type"].split(";")[0]) == (200, FILES[path])
    assert b"http://" not in content and b"https://" not in content
    if path != "/status.json":
        assert "default-src 'self'" in answer.headers["Content-Security-Policy"]


def test_the_document_is_what_the_server_says(load, server):
    held, pinned, *_ = sorted(load.paths)
    names = sorted([*load.paths, OWN])
    cli("adapters", "pin", pinned, "--server", server.address)
    with attach(load.model, server=server.address) as lora, lora.adapters([held]):
        until(lambda: all(one.stats.attached for one in status(server.address).shards), "it is reported")
        document = json.loads(get(server, "/status.json")[1])
    cli("adapters", "unpin", pinned, "--server", server.address)
    assert (document["adapters"], document["active"], document["ready"]) == (len(names), 2, True)
    assert [(one["stage"], one["ep_rank"]) for one in document["shards"]] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    hottest = {one["name"]: one for one in document["hottest"]}
    assert sorted(hottest) == names and document["hottest"][0]["name"] == held
    assert hottest[pinned]["pinned"] and not hottest[held]["pinned"]
    assert document["joined"][0]["adapters"] == [held]
    rows = {one["tenant"]: one for one in document["tenants"]}
    assert rows["acme"] == {"tenant": "acme", "engines": 0, "adapters": 1, "in use": 0}
    assert rows["(operator)"] == {"tenant": "(operator)", "engines": 1, "adapters": len(names) - 1, "in use": 1}
    assert document["hits"] + document["misses"] >= 1


def test_the_page_is_sent_what_the_document_says(server):
    with contextlib.closing(http.client.HTTPConnection(server.http, timeout=HANG_SECONDS)) as connection:
        connection.request("GET", "/status.events")
        answer = connection.getresponse()
        assert answer.headers["Content-Type"].startswith("text/event-stream")
        kind, _, data = answer.readline().decode().partition(": ")
    sent, asked = json.loads(data), json.loads(get(server, "/status.json")[1])
    assert kind == "data" and sent.keys() == asked.keys() and sent["hottest"] == asked["hottest"]
    assert {one["phase"] for one in sent["waits"]} == {"name", "place", "weights", "engine"}


@needs_browser
@pytest.mark.parametrize("size", [(1200, 1500), (390, 2400)], ids=["desk", "phone"])
def test_a_browser_shows_it(server, tmp_path, size):
    when = "document.querySelector('#asked').textContent"
    elements, picture = look(f"http://{server.http}/", tmp_path, size=size, when=when)
    assert all(f">{name}</td>" in elements for name in workload("mixtral").paths)
    assert elements.count('class="shard"') == 4 and elements.count('class="state up"') == 5
    assert ">acme</td>" in elements and ">(operator)</td>" in elements
    assert ">the adapter's weights</td>" in elements
    assert re.search(r"hit rate</dt><dd>[0-9.]+ %</dd>", elements)
    assert elements.count("<span>loads from disk</span>") == 4
    assert all(f">{label}</dt>" in elements for label in ("in use", "waiting for a place", "waiting for weights"))
    assert "refused</dt><dd>0</dd>" in elements and "NaN" not in elements and "undefined" not in elements
    assert picture.startswith(b"\x89PNG") and len(picture) > 20_000


@needs_browser
def test_an_open_page_shows_engines_that_come_and_go(load, server, tmp_path):
    nothing = "document.querySelector('#clients').textContent.includes('none has joined')"
    with opened(f"http://{server.http}/", tmp_path) as page:
        page.until(nothing)
        with attach(load.model, server=server.address):
            page.until(f"!{nothing}")
        page.until(nothing)


@needs_browser
def test_the_page_shows_what_is_loading_for_how_many_requests_and_until_when(server, tmp_path):
    """Its script, given such a document."""
    rows = [{"name": "law", "requests": 3, "expected_us": 1_500_000}, {"name": "art", "requests": 1}]
    shown = f"loading({json.dumps(rows)}), [at('loads').hidden, at('loading').textContent]"
    with opened(f"http://{server.http}/", tmp_path) as page:
        page.until("document.querySelector('#asked').textContent")
        assert page.value(shown) == [False, "adapterrequestsloaded inlaw31.5 sart1unknown"]
