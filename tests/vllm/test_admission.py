"""A server with places for two adapters: requests for others wait in vLLM's queue, and hold up nobody."""

import pytest

from client_connector.serving.plan import parse_flag
from lora_server.demo.engine import Sequence
from lora_server.demo.launch import running_server
from tests.support.serving import flags, kill, status, until
from tests.support.workload import NEW_TOKENS
from tests.vllm.engines import Engine

LONG = 60


@pytest.fixture
def crowded(load, scratch):
    with running_server(scratch / "server-crowded.log", flags(load, "--max-active-adapters", "2")) as server:
        yield server


def test_requests_without_a_place_wait_and_hold_up_nobody(load, crowded, scratch):
    prompt = load.batch[0].prompt
    patient = {"LORA_SERVER_TIMEOUT_SECONDS": "10"}  # on a busy machine, too
    with Engine(load.base, crowded.address, scratch / "engine-crowded.log", patient) as engine:
        load.check(engine.answers(load.batch, NEW_TOKENS), 1e-3)  # six adapters, two at a time
        until(lambda: status(crowded.address).active == 0, "all places are back")

        running = [engine.add(prompt, name, LONG) for name in ("fused", "experts")]
        engine.call("step", count=3)
        waiting, aborted = engine.add(prompt, "attention", NEW_TOKENS), engine.add(prompt, "qv", NEW_TOKENS)
        behind = engine.add(prompt, None, NEW_TOKENS)
        seen = engine.call("step", count=NEW_TOKENS + 2)
        assert seen[behind]["finish_reason"] == "length", "behind them in the queue, and served"
        assert waiting not in seen and status(crowded.address).queued == 2
        assert engine.call("scheduler")["running"] == 2 and engine.call("scheduler")["held"] == ["experts", "fused"]
        engine.call("abort", name=aborted)
        until(lambda: status(crowded.address).queued == 1, "the aborted one is cancelled")
        engine.call("abort", name=running[0])
        seen = engine.call("step", count=0)
        assert len(seen[running[1]]["tokens"]) == LONG and len(seen[waiting]["tokens"]) == NEW_TOKENS
        (alone,) = engine.generate([Sequence(prompt, "attention")], NEW_TOKENS)
        assert seen[waiting]["tokens"] == alone["tokens"]
        until(lambda: status(crowded.address).active == 0, "all places are back")

        running = [engine.add(prompt, name, 500) for name in ("fused", "experts")]
        waiting = engine.add(prompt, "attention", NEW_TOKENS)
        engine.call("step", count=2)
        kill(crowded)
        ended = engine.call("step", count=0)
        assert parse_flag(ended[waiting]["stop_reason"])[:2] == ("error", "server_unavailable")
