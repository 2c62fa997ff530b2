"""A request's life in traces, as a collector of OpenTelemetry gets it from real processes, and in logs."""

import json
import os
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from client_connector.remote import RemoteServer
from client_connector.serving.leases import AdapterLeases
from client_connector.serving.settings import Settings
from client_connector.transformers import attach
from lora_server import telemetry
from lora_server.demo.launch import running_server
from lora_server.errors import UnknownAdapterError
from tests.support.serving import HANG_SECONDS, flags, listed, metric, until


class Collector(ThreadingHTTPServer):
    """OTLP by HTTP. `spans`: (process, name, trace, id, parent, attributes, failed)"""

    daemon_threads = False

    def __init__(self):
        self.spans = []
        super().__init__(("127.0.0.1", 0), Traces)
        self.endpoint = f"http://127.0.0.1:{self.server_port}"

    def named(self, name, **attributes):
        wanted = {f"lora.{key}": value for key, value in attributes.items()}.items()
        return [one for one in self.spans if one["name"] == name and wanted <= one["attributes"].items()]

    def wait_for(self, name, **attributes):
        until(lambda: self.named(name, **attributes), f"a span {name} {attributes}")
        return self.named(name, **attributes)[0]


class Traces(BaseHTTPRequestHandler):
    def do_POST(self):
        assert self.path == "/v1/traces"
        request = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["Content-Length"])))
        for of_process in request.resource_spans:
            about = values(of_process.resource.attributes)
            process = about["service.name"], about.get("service.instance.id", "")
            for scope in of_process.scope_spans:
                for one in scope.spans:
                    fields = {"name": one.name, "trace": one.trace_id, "id": one.span_id, "parent": one.parent_span_id}
                    took = (one.end_time_unix_nano - one.start_time_unix_nano) * 1e-9
                    fields |= {"attributes": values(one.attributes), "failed": one.status.code == 2, "took": took}
                    self.server.spans.append(fields | {"process": process})
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_):
        pass


def values(attributes):
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in attributes}


@pytest.fixture(scope="module")
def collector():
    """This process sends its spans there, too."""
    with Collector() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
            patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", server.endpoint)
            yield server
            telemetry.shutdown()
        server.shutdown()
        thread.join(HANG_SECONDS)


@pytest.fixture(scope="module")
def server(collector, load, tmp_path_factory):
    more = ("--max-active-adapters", "1", "--device-pool", "490000", "--otlp-endpoint", collector.endpoint)
    log, of_load = tmp_path_factory.mktemp("server") / "log", flags(load, *more, "--log-format", "json")
    with running_server(log, of_load) as running:
        yield running


def in_trace(collector, name, of):
    return [one for one in collector.named(name) if one["trace"] == of["trace"]]


def test_a_request_is_one_trace_through_engine_and_server(collector, load, server):
    with attach(load.model, server=server.address, timeout_seconds=HANG_SECONDS) as lora:
        for name in ("attention", "fused"):  # the pool holds one; no other test uses the second
            with telemetry.span(f"of {name}"), lora.adapters([name]):
                until(lambda name=name: listed(server.address)[name].state == "ready", "the hold alone loads it")
                load.model(torch.tensor([load.batch[0].prompt]))
    request = collector.wait_for("of fused")
    until(lambda: in_trace(collector, "lora.acquire", request), "its request for an adapter")
    (acquire,) = in_trace(collector, "lora.acquire", request)
    names = ("lora.generation", "lora.server.Acquire", "lora.load")
    until(lambda: all(in_trace(collector, name, acquire) for name in names), "all of its trace")
    ((generation,), (answered,), (loaded,)) = (in_trace(collector, name, acquire) for name in names)
    processes = [("lora-connector", ""), ("lora-server", "controller"), ("lora-server", "shard 0")]
    assert [one["process"] for one in (generation, answered, loaded)] == processes
    parents = [one["parent"] for one in (acquire, answered, loaded)]
    assert parents == [one["id"] for one in (generation, acquire, answered)]
    assert loaded["attributes"]["lora.tier"] == "disk" and loaded["attributes"]["lora.bytes"] > 0
    join = collector.wait_for("lora.join", server=server.address)
    until(lambda: [one for one in collector.named("lora.server.Join") if one["parent"] == join["id"]], "it joined")
    assert not collector.named("lora.server.Heartbeat")


def test_the_wait_for_a_place_is_a_span(collector, server):
    sessions = [RemoteServer(server.address, links=False).join(HANG_SECONDS) for _ in range(2)]
    try:
        first, second = sessions
        (held,) = first.acquire(["qv"], time.monotonic() + HANG_SECONDS)
        with telemetry.span("test"):
            ticket = second.ticket()
            second.ask(ticket, ["experts"])
        first.release([held.handle])
        waited = collector.wait_for("lora.admission", adapters="experts")
        assert waited["trace"] == collector.wait_for("test")["trace"] and waited["took"] > 0
    finally:
        for session in sessions:
            session.leave()


def test_a_refused_call_is_found_by_its_id(collector, server):
    def refusals():
        return metric(server.get("/metrics")[1], 'lora_server_refusals_total{code="unknown_adapter"}')

    session, before = RemoteServer(server.address, links=False).join(HANG_SECONDS), refusals()
    try:
        with pytest.raises(UnknownAdapterError) as raised, telemetry.span("refused"):
            session.acquire(["nobody"])
    finally:
        session.leave()

    def said_of_it():
        lines = [json.loads(line) for line in server.log.read_text().splitlines() if line.startswith("{")]
        return [line for line in lines if line.get("request") == raised.value.request and raised.value.request]

    until(said_of_it, "the log has it, perhaps after the answer")
    (said,) = said_of_it()
    assert (said["event"], said["method"], said["code"]) == ("refused", "Acquire", "unknown_adapter")
    trace = collector.wait_for("refused")["trace"]
    until(lambda: [one for one in collector.named("lora.server.Acquire") if one["trace"] == trace], "it came")
    assert all(one["failed"] for one in collector.named("lora.server.Acquire") if one["trace"] == trace)
    assert refusals() == before + 1


def test_an_engines_requests_keep_their_ids_and_traces(collector, server):
    """What vLLM hands over: its request's id, and the headers of its span."""
    headers = {"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01"}
    leases = AdapterLeases(Settings(server.address), lambda text: ())
    try:
        for request, name in (("cmpl-1", "qv"), ("cmpl-2", "nobody")):
            leases.hold(request, name, (), headers)
            until(lambda request=request: not leases.state(request).is_undecided, "the server's answer")
        assert leases.state("cmpl-1").failure is None
        assert leases.state("cmpl-2").failure.code == "unknown_adapter"
        leases.release("cmpl-1"), leases.release("cmpl-2")
    finally:
        leases.close()
    for request, failure in (("cmpl-1", ""), ("cmpl-2", "unknown_adapter")):
        whole = collector.wait_for("lora.generation", request=request)
        assert (whole["trace"].hex(), whole["parent"].hex()) == ("ab" * 16, "cd" * 8)
        assert whole["attributes"]["lora.failure"] == failure
        acquire = collector.wait_for("lora.acquire", request=request)
        assert acquire["trace"].hex() == "ab" * 16 and acquire["failed"] == bool(failure)
        assert collector.wait_for("lora.server.Acquire", request=request)["parent"] == acquire["id"]


def test_nothing_is_imported_where_no_collector_is():
    code = """
import sys
import client_connector.remote
from lora_server import telemetry
client_connector.remote.RemoteServer("127.0.0.1:1")
with telemetry.span("one"):
    telemetry.record("two", 0.0)
assert not telemetry.headers() and not any(name.startswith("opentelemetry") for name in sys.modules)
"""
    environment = {key: value for key, value in os.environ.items() if key not in telemetry.ENDPOINTS}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=HANG_SECONDS)
