"""The HTTP port: its answers; hostile and slow requests cost one log line at most and delay no other and no end."""

import contextlib
import gzip
import http.client
import random
import ssl
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from lora_server.control.connections import MAX_OF_A_HOST
from lora_server.control.http.limits import MAX_CONNECTIONS
from lora_server.control.http.page import live
from lora_server.control.http.server import HttpServer
from tests.support.certificates import Authority
from tests.support.hostile_http import HOSTILE, attack, opened, request
from tests.support.serving import HANG_SECONDS, until

PER_KIND = 100
SERVE = """
import sys
from lora_server import logs
from lora_server.control.http.server import HttpServer
logs.configure()
server = HttpServer("127.0.0.1", 0, lambda: "not yet", None)
print(server.port, flush=True)
sys.stdin.read()
server.close()
"""


class Numbers(Collector):
    def collect(self):
        yield GaugeMetricFamily("the_answer", "A number", 42)
        yield GaugeMetricFamily("long", "x" * 2000, 1)


@contextlib.contextmanager
def serving(not_ready=lambda: "", **options):
    with contextlib.closing(HttpServer("127.0.0.1", 0, not_ready, Numbers(), **options)) as server:
        yield server


def get(port, path, method="GET", **headers):
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=HANG_SECONDS)) as connection:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.headers["Content-Type"], answer.read()


# -- what it answers


def test_paths_codes_and_types():
    text, reasons = "text/plain; charset=utf-8", ["shards not up: [1]", ""]
    with serving(lambda: reasons[0]) as server:
        assert get(server.port, "/livez") == (200, text, b"ok\n")
        assert get(server.port, "/readyz") == (503, text, b"shards not up: [1]\n")
        del reasons[0]
        assert get(server.port, "/readyz?verbose=1") == (200, text, b"ok\n")
        for path in ("/", "/livez/", "/nowhere", "//livez", "/%ff"):
            assert get(server.port, path) == (404, text, b"try /livez, /readyz, /metrics\n"), path
        assert get(server.port, "/livez", "POST")[0] == 405


def test_metrics_in_every_form():
    with serving() as server:
        code, kind, body = get(server.port, "/metrics")
        assert (code, kind.startswith("text/plain; version=")) == (200, True)
        assert b"\nthe_answer 42.0\n" in body
        packed = get(server.port, "/metrics", **{"Accept-Encoding": "gzip"})
        assert (packed[:2], gzip.decompress(packed[2])) == ((code, kind), body)
        assert get(server.port, "/metrics", Accept="application/openmetrics-text")[2].endswith(b"# EOF\n")
        assert get(server.port, "/metrics", Accept="text/plain;version=x")[0] in (200, 400), "new clients parse it"


def test_readers_of_live_data_are_sent_it_anew_when_it_changes(monkeypatch):
    monkeypatch.setattr(live, "BEAT_SECONDS", 100 * HANG_SECONDS)
    monkeypatch.setattr(live, "STREAM_SECONDS", 100 * HANG_SECONDS)
    changes = [0]
    data = live.LiveData(lambda: {"changes": changes[0]})
    options = {"more": {"/live": data.answer}, "request_seconds": 10 * HANG_SECONDS}
    with serving(**options) as server, contextlib.ExitStack() as stack:
        readers = [opened(server.port, b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n") for _ in range(2)]
        streams = [stack.enter_context(stack.enter_context(one).makefile("rb")) for one in readers]
        for changes[0] in range(3):
            data.wake()
            for stream in streams:
                while f'data: {{"changes": {changes[0]}}}\n'.encode() != stream.readline():
                    pass


def test_a_taken_port_is_an_error_of_the_constructor():
    with serving() as server, pytest.raises(OSError, match="in use"):
        HttpServer("127.0.0.1", server.port, lambda: "", None)
    HttpServer("127.0.0.1", server.port, lambda: "", None).close()


# -- hostile and slow clients


@pytest.fixture(scope="module")
def child(tmp_path_factory):
    """(port, what it has logged so far) of a process, since what is written to stderr counts."""
    log = tmp_path_factory.mktemp("http") / "log"
    with log.open("wb") as stream:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": stream}
        process = subprocess.Popen([sys.executable, "-c", SERVE], **pipes)
    yield int(process.stdout.readline()), log.read_text
    process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == 0
    assert "Traceback" not in log.read_text()


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_request_costs_one_line_at_most(child, kind):
    port, logged = child
    rng, before = random.Random(kind), len(logged().splitlines())
    for _ in range(PER_KIND):
        attack(port, HOSTILE[kind](rng), rng.choice(["read", "close", "reset"]))
    assert get(port, "/livez")[0] == 200
    assert "Traceback" not in logged()
    assert len(logged().splitlines()) - before <= PER_KIND


def test_slow_clients_delay_neither_others_nor_the_end():
    with serving(request_seconds=10 * HANG_SECONDS) as server, contextlib.ExitStack() as stack:
        for payload in (b"", b"GET /livez HT", b"POST /livez HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n1"):
            for _ in range(20):
                stack.enter_context(opened(server.port, payload))
        assert get(server.port, "/livez")[0] == 200
        server.close()
        server.close()
        until(lambda: not server._thread.is_alive(), "it ends, though they have not")
        with pytest.raises(ConnectionError):
            opened(server.port)


def test_probes_are_answered_whatever_strangers_hold():
    with serving(request_seconds=10 * HANG_SECONDS) as server, contextlib.ExitStack() as stack:
        held = [stack.enter_context(opened(server.port, b"GET /livez HT")) for _ in range(2 * MAX_CONNECTIONS)]
        for _ in range(3):
            for path in ("/livez", "/readyz"):
                assert get(server.port, path)[0] == 200
        with contextlib.suppress(ConnectionError):
            assert held[0].recv(1) == b"", "the oldest ended"
        held[-1].sendall(b"TP/1.1\r\nHost: x\r\n\r\n")
        assert held[-1].recv(100).startswith(b"HTTP/1.1 200"), "the newest did not"
        assert len(server._server.server_state.connections) <= MAX_CONNECTIONS


def test_a_probe_that_waits_for_its_answer_is_not_ended():
    asked, answer = threading.Event(), threading.Event()

    def not_ready():
        asked.set()
        answer.wait(HANG_SECONDS)
        return ""

    with serving(not_ready, request_seconds=10 * HANG_SECONDS) as server, contextlib.ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor())
        probe = pool.submit(get, server.port, "/readyz")
        assert asked.wait(HANG_SECONDS)
        for _ in range(2 * MAX_CONNECTIONS):
            stack.enter_context(opened(server.port, b"GET /livez HT"))
        assert get(server.port, "/livez")[0] == 200
        answer.set()
        assert probe.result(HANG_SECONDS)[0] == 200


def test_handshakes_that_do_not_end_are_bounded(tmp_path):
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(*Authority(tmp_path).issue("server"))
    with serving(tls=tls, look_seconds=0.01) as server, contextlib.ExitStack() as stack:
        held = [stack.enter_context(opened(server.port)) for _ in range(MAX_OF_A_HOST + 20)]
        held[0].settimeout(30.0)  # asyncio gives it a minute
        assert held[0].recv(1) == b"", "the oldest ended"


def test_a_server_without_descriptors_fills_no_log(tmp_path):
    """Connections come all the time, and none can be accepted."""
    few = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (20, 20))\n"
    with (tmp_path / "log").open("wb") as stream, contextlib.ExitStack() as stack:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": stream}
        process = subprocess.Popen([sys.executable, "-c", SERVE.replace("print(", f"{few}print(")], **pipes)
        port, logged = int(process.stdout.readline()), (tmp_path / "log").read_text
        for _ in range(60):
            stack.enter_context(opened(port, b"GET /livez HT"))
        until(lambda: "out of system resource" in logged(), "it has none left")
        until(lambda: "(again)" in logged(), "it goes on")
        assert len(logged().splitlines()) < 20
        process.communicate(timeout=HANG_SECONDS)


def test_an_answer_that_nobody_reads_ends():
    length = 1 << 24  # more than the kernel keeps for a reader
    with (
        serving(lambda: "x" * length, request_seconds=6.0) as server,
        opened(server.port, request(path=b"/readyz")) as connection,
    ):
        assert connection.recv(100).startswith(b"HTTP/1.1 503")
        until(lambda: not server._server.server_state.connections, "the server has dropped it")
        assert sum(map(len, iter(lambda: connection.recv(1 << 20), b""))) < length


def test_a_question_that_blocks_delays_neither_others_nor_the_end():
    asked, answer = threading.Semaphore(0), threading.Event()

    def not_ready():
        asked.release()
        answer.wait(HANG_SECONDS)
        return ""

    try:
        with serving(not_ready) as server, contextlib.ExitStack() as stack:
            for _ in range(20):
                stack.enter_context(opened(server.port, request(path=b"/readyz")))
            for _ in range(4):
                assert asked.acquire(timeout=HANG_SECONDS)
            assert get(server.port, "/livez")[0] == 200
            assert b"the_answer" in get(server.port, "/metrics")[2]
            assert not asked.acquire(blocking=False), "four at a time"
            server.close()
            until(lambda: not server._thread.is_alive(), "it ends without the answers", HANG_SECONDS / 2)
    finally:
        answer.set()
