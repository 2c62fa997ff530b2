"""A 503 of an API server whose engine has a LoRA server says when to try again; no other answer is touched."""

import asyncio

import pytest
from fastapi import FastAPI
from starlette.responses import JSONResponse

from client_connector.serving.wrapping import wrap
from client_connector.vllm.hooks.frontend import LOOKUP, _stacked


class Models:
    """Where vLLM keeps the names that it serves."""


def answer(app, path):
    """Status and headers of a GET."""
    said = []

    async def receive():
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message):
        said.append(message)

    scope = {"type": "http", "method": "GET", "path": path, "query_string": b"", "headers": [], "http_version": "1.1"}
    asyncio.run(app(scope, receive, send))
    return said[0]["status"], dict(said[0]["headers"])


@pytest.fixture
def app(monkeypatch):
    monkeypatch.setattr(FastAPI, "build_middleware_stack", FastAPI.build_middleware_stack)
    wrap(FastAPI, "build_middleware_stack", _stacked)
    made = FastAPI()
    made.state.openai_serving_models = Models()

    @made.get("/{status}")
    async def told(status: int, own: str = ""):
        return JSONResponse({}, status)

    @made.get("/own/{seconds}")
    async def own(seconds: str):
        return JSONResponse({}, 503, {"Retry-After": seconds})

    return made


def test_a_503_says_when_to_try_again(app):
    setattr(app.state.openai_serving_models, LOOKUP, object())
    status, headers = answer(app, "/503")
    assert (status, headers[b"retry-after"]) == (503, b"1")
    assert answer(app, "/own/7")[1][b"retry-after"] == b"7"
    for other in (200, 404, 500):
        status, headers = answer(app, f"/{other}")
        assert status == other and b"retry-after" not in headers


def test_a_server_that_is_not_ours_is_as_it_was(app):
    assert b"retry-after" not in answer(app, "/503")[1]
