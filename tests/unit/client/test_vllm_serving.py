"""Around vLLM's server, without vLLM: tenants, names while the LoRA server is away, log lines, a start that fails."""

import asyncio
import contextlib
import io
import json
import logging
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import structlog
from rich.console import Console

from client_connector.directory import AdapterDirectory
from client_connector.serving.lookup import Lookup
from client_connector.serving.settings import tenant_and_name
from client_connector.serving.tenants import CALLER, TENANT_HEADER
from client_connector.vllm.logs import NAME, join_vllms
from client_connector.vllm.tenants import COMPUTE_PATHS, Tenants
from lora_server.access.identity import Role
from lora_server.access.tokens import parse
from lora_server.control.adapters.records import Record
from lora_server.control.rpc.registration import Doorkeeper
from lora_server.control.rpc.server import ControlServer
from lora_server.demo import children
from lora_server.demo.launch import free_address
from lora_server.demo.vllm_process import LAST_LINES, VllmProcess
from lora_server.errors import ConfigError, ServerUnavailableError, UnknownAdapterError
from lora_server.logs import Repeats
from lora_server.timings import Timings
from tests.support.controllers import kept, make_controller
from tests.support.gated import Gated
from tests.support.serving import HANG_SECONDS, until

COMPLETIONS = "/v1/completions"


@pytest.fixture(scope="module")
def gated(tmp_path_factory):
    with contextlib.ExitStack() as stack:
        yield Gated(tmp_path_factory.mktemp("gated"), stack)


@pytest.fixture
def tenants(gated, monkeypatch):
    monkeypatch.setenv("LORA_SERVER_ADDRESS", gated.address)
    monkeypatch.setenv("LORA_SERVER_TOKEN", gated.tokens["", Role.ENGINE])
    made = Tenants(echo)
    yield made
    made._directory.close()


async def echo(scope, receive, send):
    """Which model was asked for, as whom."""
    body, more = b"", scope["method"] == "POST"
    while more:
        message = await receive()
        body, more = body + message["body"], message["more_body"]
    said = {"model": json.loads(body or b"{}").get("model"), "as": CALLER.get() and CALLER.get()[:2]}
    length = [int(value) for name, value in scope["headers"] if name == b"content-length"]
    assert length in ([], [len(body)])
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": json.dumps(said).encode()})


def ask(app, token="", path=COMPLETIONS, model="bot", method="POST", body=None, kind="http", **headers):
    """Status, and what the app said; in a context of its own, as a server gives each request."""
    body = json.dumps({"model": model}).encode() if body is None else body
    shown = [(b"authorization", f"Bearer {token}".encode())] if token else []
    shown += [(name.encode(), value.encode()) for name, value in headers.items()]
    models = SimpleNamespace(is_base_model=lambda name: name == "base")
    served = SimpleNamespace(state=SimpleNamespace(openai_serving_models=models))
    scope = {"type": kind, "path": path, "method": method, "headers": shown, "app": served}
    parts, sent = [body[:5], body[5:]], []

    async def receive():
        part = parts.pop(0)
        return {"type": "http.request", "body": part, "more_body": bool(parts)}

    async def send(message):
        sent.append(message)

    asyncio.run(app(scope, receive, send))
    return (sent[0]["status"], json.loads(sent[1]["body"])) if kind == "http" else (sent[0], None)


def test_a_request_is_its_tenants(gated, tenants):
    engine = {tenant: gated.tokens[tenant, Role.ENGINE] for tenant in ("", "acme", "rival")}
    assert ask(tenants, engine["acme"]) == (200, {"model": "acme|bot", "as": ["acme", "engine"]})
    assert ask(tenants, engine["rival"]) == (200, {"model": "rival|bot", "as": ["rival", "engine"]})
    assert ask(tenants, engine["rival"], model="acme/bot")[1]["model"] == "rival|acme/bot", "which it does not see"
    assert ask(tenants, engine["acme"], model="base")[1]["model"] == "base"
    assert ask(tenants, engine[""])[1]["model"] == "bot"
    assert tenant_and_name("acme|bot") == ("acme", "bot") and tenant_and_name("acme/bot") == ("", "acme/bot")


@pytest.mark.parametrize("model", ["rival|bot", "|bot", "acme|rival|bot", 7, ["x"]])
def test_nobody_names_a_tenant_himself(gated, tenants, model):
    for tenant in ("acme", ""):
        assert ask(tenants, gated.tokens[tenant, Role.ENGINE], model=model)[0] == 400


def test_what_is_no_request_reaches_nobody(gated, tenants):
    token = gated.tokens["acme", Role.ENGINE]
    for body in (b"[]", b"nonsense", b'{"model": "bot"', b"[" * 100_000):
        assert ask(tenants, token, body=body)[0] == 400
    status, said = ask(tenants, token, body=b"")
    assert status == 400 or said["model"] is None


def test_who_is_nobody_gets_health_alone(gated, tenants):
    for path in (*COMPUTE_PATHS, "/v1/models", "/v1/load_lora_adapter", "/metrics", "/docs", "/reset_prefix_cache"):
        for token in ("", "hello", "\x1b[2J", "x" * 5000, f"{gated.tokens['acme', Role.ENGINE]}x"):
            status, said = ask(tenants, token, path, method="GET" if path == "/v1/models" else "POST")
            assert status == 401 and "Bearer ls_" in said["error"]["message"]
    assert ask(tenants, "", "/health", method="GET")[0] == 200
    assert ask(tenants, "", kind="websocket")[0] == {"type": "websocket.close", "code": 1008}


MAY = {
    ("POST", COMPLETIONS): {Role.ADMIN, Role.ENGINE}, ("GET", "/v1/models"): set(Role),
    ("POST", "/v1/load_lora_adapter"): {Role.ADMIN, Role.PUBLISHER},
    ("POST", "/v1/unload_lora_adapter"): {Role.ADMIN, Role.PUBLISHER}, ("GET", "/metrics"): set(),
    ("POST", "/v1/audio/transcriptions"): set(), ("POST", "/collective_rpc"): set(), ("DELETE", "/v1/models"): set(),
}  # fmt: skip


@pytest.mark.parametrize("call", MAY, ids=" ".join)
def test_roles(gated, tenants, call):
    method, path = call
    for role in Role:
        status, _ = ask(tenants, gated.tokens["acme", role], path, method=method)
        assert (status, role) == (200 if role in MAY[call] else 403, role)
    assert ask(tenants, gated.tokens["", Role.ADMIN], path, method=method)[0] == 200
    watches = ask(tenants, gated.tokens["", Role.VIEWER], "/metrics", method="GET")
    assert watches[0] == 200


def test_a_revoked_token_is_forgotten_soon(gated, tenants, monkeypatch):
    token, secret = gated.gate.store.create_token("acme", Role.ENGINE)
    gated.gate.cache.refresh()
    assert ask(tenants, str(secret))[0] == 200
    gated.gate.store.revoke_token(token.id, token.identity)
    gated.gate.cache.refresh()
    until, caller = tenants._known[str(secret)]
    tenants._known[str(secret)] = until - Timings.token_known, caller  # so much later
    assert ask(tenants, str(secret))[0] == 401
    assert parse(str(secret)).secret not in repr(tenants)


def test_a_gateways_header_counts_where_it_is_named(gated, monkeypatch, tenants):
    assert ask(tenants, **{"x-tenant": "acme"})[0] == 401
    monkeypatch.setenv(TENANT_HEADER, "X-Tenant")
    named = Tenants(echo)
    assert ask(named, **{"x-tenant": "acme"})[1]["model"] == "acme|bot"
    assert ask(named, gated.tokens["rival", Role.ENGINE], **{"x-tenant": "acme"})[1]["model"] == "rival|bot"
    named._directory.close()


def test_it_needs_a_server(monkeypatch):
    monkeypatch.delenv("LORA_SERVER_ADDRESS", raising=False)
    with pytest.raises(ConfigError, match="LORA_SERVER_ADDRESS: got none"):
        Tenants(echo)


@pytest.fixture
def away(stack):
    """An address where nobody listens yet, and how to begin: a server with adapter law."""
    address = free_address()
    directory = AdapterDirectory(address)
    stack.callback(directory.close)

    def begin():
        controller = make_controller()
        stack.callback(controller.shards.close)
        controller.adapters.catalog.publish(Record.decode(kept("law", 70_000).record))
        stack.callback(ControlServer(controller, address, Doorkeeper("")).close, 0.2)

    return directory, begin


class Clock:
    """That of a test; who looks at it says so."""

    def __init__(self):
        self.now, self.looked = 0.0, asyncio.Event()

    def __call__(self):
        self.looked.set()
        return self.now


def run(play):
    asyncio.run(asyncio.wait_for(play, HANG_SECONDS))


def test_a_name_waits_for_the_server_and_is_found(away):
    directory, begin = away

    async def play():
        clock = Clock()
        lookup = Lookup(directory, 1.0, clock)
        asked = [asyncio.create_task(lookup.get(name)) for name in ("law", "nobody")]
        await clock.looked.wait()
        await asyncio.to_thread(begin)
        assert (await asked[0]).name == "law"
        with pytest.raises(UnknownAdapterError):
            await asked[1]

    run(play())


def test_an_outage_has_so_much_time_for_all(away):
    directory, begin = away

    async def play():
        clock = Clock()
        lookup = Lookup(directory, 10.0, clock)
        first = asyncio.create_task(lookup.get("law"))
        await clock.looked.wait()
        with pytest.raises(ServerUnavailableError, match="is it running"):
            await lookup.get("law", waits=False)
        assert not first.done()
        clock.now = 10.0
        with pytest.raises(ServerUnavailableError):
            await first
        with pytest.raises(ServerUnavailableError):
            await lookup.get("law")  # at once: this clock stands still
        await asyncio.to_thread(begin)
        while True:
            with contextlib.suppress(ServerUnavailableError):
                assert (await lookup.get("law")).name == "law"
                break
        assert lookup._outage.seconds == 0, "the next outage has its own time"

    run(play())


@pytest.fixture
def records():
    """What vLLM's handler gets, from a logger at INFO."""
    logger, found = logging.getLogger(NAME), []
    handler = logging.Handler()
    handler.emit = found.append
    before = structlog.get_config() if structlog.is_configured() else None
    structlog.reset_defaults()
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield found
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)
    structlog.reset_defaults()
    if before is not None:
        structlog.configure(**before)


def test_lines_go_to_vllms_logger(records):
    join_vllms()
    log = structlog.get_logger()
    log.debug("nobody asked")
    log.info("attached", server="127.0.0.1:7400", adapters=2, error="two words")
    Repeats(log.warning)("key", "failed")
    try:
        raise ValueError("100 %s")
    except ValueError:
        log.exception("broke")
    texts = [record.getMessage() for record in records]
    assert texts[:2] == ["attached server=127.0.0.1:7400 adapters=2 error='two words'", "failed"]
    assert texts[2].startswith("broke\nTraceback") and texts[2].endswith("ValueError: 100 %s")
    assert [record.levelname for record in records] == ["INFO", "WARNING", "ERROR"]
    assert {record.filename for record in records} == {Path(__file__).name}, "not ours or structlog's own helpers"


def test_an_application_that_configured_structlog_keeps_its_log(records):
    own = []
    structlog.configure(processors=[lambda _, __, said: own.append(said) or (_ for _ in ()).throw(structlog.DropEvent)])
    join_vllms()
    structlog.get_logger().info("attached")
    assert own and not records


REASON = "(Worker pid=7) ERROR 11-22 06:05:27 [executor.py:953] lora_server.errors.ConfigError: the reason"


@pytest.mark.parametrize(("after", "seconds", "words"), [
    ("exit 3", 60.0, "vLLM ended with exit code 3 before it was ready; the end of its log:"),
    ("exec sleep 600", 1.0, "vLLM: not ready within 1 s; the end of its log:"),
])  # fmt: skip
def test_a_vllm_that_does_not_get_ready_leaves_last_words(tmp_path, after, seconds, words):
    """The last lines, and the error that its processes logged long before; a shell stands in vLLM's place."""
    script = f"echo '{REASON}'; for i in $(seq 100); do echo line-$i; done; {after}"
    vllm = VllmProcess(["bash", "-c", script], os.environ, free_address(), tmp_path / "log")
    try:
        until(lambda: (tmp_path / "log").read_text().count("\n") == 101, "its lines are there")
        with pytest.raises(ServerUnavailableError) as raised:
            vllm.wait_ready(Console(file=io.StringIO()), seconds)
    finally:
        children.stop(vllm.process)
    said, *lines = str(raised.value).splitlines()
    assert said == words
    assert lines == [*(f"line-{i}" for i in range(101 - LAST_LINES, 101)), "lora_server.errors.ConfigError: the reason"]
