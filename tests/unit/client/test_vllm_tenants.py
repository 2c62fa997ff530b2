"""The middleware of vLLM's server before an app that says what reached it; tests/vllm/test_tenants.py has vLLM."""

import asyncio
import contextlib
import json
from types import SimpleNamespace

import pytest

from client_connector.serving.settings import whose
from client_connector.vllm.tenants import ASKS, CALLER, TENANT_HEADER, Tenants
from lora_server.access.identity import Role
from lora_server.access.tokens import parse
from lora_server.errors import ConfigError
from lora_server.timings import Timings
from tests.support.gated import Gated

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
    scope = {
        "type": kind,
        "path": path,
        "method": method,
        "headers": shown,
        "app": SimpleNamespace(state=SimpleNamespace(openai_serving_models=models)),
    }
    parts = [body[:5], body[5:]]
    sent = []

    async def receive():
        part = parts.pop(0)
        return {"type": "http.request", "body": part, "more_body": bool(parts)}

    async def send(message):
        sent.append(message)

    asyncio.run(app(scope, receive, send))
    if kind != "http":
        return sent[0], None
    return sent[0]["status"], json.loads(sent[1]["body"])


def test_a_request_is_its_tenants(gated, tenants):
    engine = {tenant: gated.tokens[tenant, Role.ENGINE] for tenant in ("", "acme", "rival")}
    assert ask(tenants, engine["acme"]) == (200, {"model": "acme|bot", "as": ["acme", "engine"]})
    assert ask(tenants, engine["rival"]) == (200, {"model": "rival|bot", "as": ["rival", "engine"]})
    assert ask(tenants, engine["rival"], model="acme/bot")[1]["model"] == "rival|acme/bot", "which it does not see"
    assert ask(tenants, engine["acme"], model="base")[1]["model"] == "base"
    assert ask(tenants, engine[""])[1]["model"] == "bot"
    assert whose("acme|bot") == ("acme", "bot") and whose("acme/bot") == ("", "acme/bot")


@pytest.mark.parametrize("model", ["rival|bot", "|bot", "acme|rival|bot", 7, ["x"]])
def test_nobody_names_a_tenant_himself(gated, tenants, model):
    for tenant in ("acme", ""):
        assert ask(tenants, gated.tokens[tenant, Role.ENGINE], model=model)[0] == 400


@pytest.mark.parametrize("body", [b"", b"[]", b"nonsense", b'{"model": "bot"', b"[" * 100_000])
def test_what_is_no_request_reaches_nobody(gated, tenants, body):
    status, said = ask(tenants, gated.tokens["acme", Role.ENGINE], body=body)
    assert status == 400 or (body == b"" and said["model"] is None)


def test_who_is_nobody_gets_health_alone(gated, tenants):
    for path in (*ASKS, "/v1/models", "/v1/load_lora_adapter", "/metrics", "/docs", "/reset_prefix_cache"):
        for token in ("", "hello", f"{gated.tokens['acme', Role.ENGINE]}x"):
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
    gated.gate.look()
    assert ask(tenants, str(secret))[0] == 200
    gated.gate.store.revoke_token(token.id, token.identity)
    gated.gate.look()
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
