"""The server dies in the middle of a generation: requests wait for it, and go on with their adapter; end with a clear
error after a while; or are flagged. The engine lives."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from client_connector.serving.plan import parse_flag
from lora_server.demo import tiny
from lora_server.demo.engine import Sequence, generate
from lora_server.demo.launch import RunningServer, launch
from tests.support.serving import HANG_SECONDS, cli, kill, status, until
from tests.support.workload import NEW_TOKENS
from tests.vllm.engines import Engine

LONG = 40
IMPATIENT = {"LORA_SERVER_TIMEOUT_SECONDS": "2"}
PATIENT = {"LORA_SERVER_TIMEOUT_SECONDS": str(HANG_SECONDS)}


@pytest.fixture
def killable(load, tmp_path):
    """start(address) gives a server there that a test may kill, with all its shards."""
    running: list[RunningServer] = []

    def start(address: str | None = None) -> RunningServer:
        flags = ["--base-model", str(load.base), "--adapters", str(load.adapters), "--layout", "ep2-pp1"]
        flags += [] if address is None else ["--listen", address]
        server = launch(tmp_path / f"server-{len(running)}.log", *flags)
        server.address = address or server.address
        running.append(server)
        server.wait_ready()
        return server

    yield start
    for server in running:
        server.stop()


def start_two(load, engine) -> tuple[str, str]:
    """A request with an adapter and one without, both decoding."""
    adapted = engine.call("add", request={"prompt": load.batch[0].prompt, "adapter": "fused", "new_tokens": LONG})
    base = engine.call("add", request={"prompt": load.batch[0].prompt, "adapter": None, "new_tokens": LONG})
    engine.call("step", count=6)
    return adapted, base


def peft(load, name: str | None, prompt: list[int], new_tokens: int):
    model = load.model if name is None else tiny.peft_model(load.model, load.paths[name])
    return generate(model, [Sequence(prompt, None)], new_tokens)[0].tokens


def test_policy_error(load, killable, scratch):
    server = killable()
    engine = Engine(load.base, server.address, scratch / "engine-error.log", IMPATIENT)
    try:
        adapted, base = start_two(load, engine)
        kill(server)
        answers = engine.call("step", count=0)
        assert answers[adapted]["finish_reason"] == "error"
        outcome, code, message = parse_flag(answers[adapted]["stop_reason"])
        assert (outcome, code) == ("error", "shard_unavailable"), message
        assert "shard" in message and "closed" in message
        assert answers[base]["tokens"] == peft(load, None, load.batch[0].prompt, LONG), "base rows are not touched"

        reply = engine.generate([Sequence(load.batch[0].prompt, "fused")], NEW_TOKENS)[0]
        assert reply["finish_reason"] == "error" and "server_unavailable" in reply["stop_reason"]
        killable(server.address)
        until(lambda: is_served(engine, load.batch[0]), "it has joined anew", HANG_SECONDS)
        load.check(engine.answers(load.batch, NEW_TOKENS), 1e-3)
    finally:
        engine.close()


def is_served(engine, sequence):
    return engine.generate([sequence], 1)[0]["stop_reason"] is None


def test_a_killed_controller_is_not_missed(load, killable, scratch):
    """Running requests go on under its shards' eyes; once it is back, under the old lease, so do new ones."""
    server = killable()
    engine = Engine(load.base, server.address, scratch / "engine-controller.log")
    try:
        before = status(server.address)
        adapted, base = start_two(load, engine)
        os.kill(before.pid, signal.SIGKILL)
        answers = engine.call("step", count=0)
        assert answers[adapted]["tokens"] == peft(load, "fused", load.batch[0].prompt, LONG)
        assert answers[base]["tokens"] == peft(load, None, load.batch[0].prompt, LONG)
        server.wait_ready()
        load.check(engine.answers(load.batch, NEW_TOKENS), 1e-3)
        after = status(server.address)
        assert (after.run, after.clients) == (before.run, before.clients)
        assert [shard.pid for shard in after.shards] == [shard.pid for shard in before.shards]
    finally:
        engine.close()


def test_no_request_fails_while_shards_are_started_anew(load, killable, scratch):
    """One is drained and started anew between requests, one is killed in the middle of one: neither is noticed."""
    server = killable()
    engine = Engine(load.base, server.address, scratch / "engine-restart.log", PATIENT)
    try:
        before = {one.shard: one.pid for one in status(server.address).shards}
        with ThreadPoolExecutor(1) as pool:
            adapted, base = start_two(load, engine)
            drained = pool.submit(cli, "drain", "--shard", "1", "--server", server.address, seconds=HANG_SECONDS)
            answers = engine.call("step", count=0)
            while not drained.done():
                load.check(engine.answers(load.batch, NEW_TOKENS), 1e-3)
            assert drained.result().returncode == 0, drained.result().stderr
        load.check(engine.answers(load.batch, NEW_TOKENS), 1e-3)
        assert answers[adapted]["tokens"] == peft(load, "fused", load.batch[0].prompt, LONG)
        assert answers[base]["tokens"] == peft(load, None, load.batch[0].prompt, LONG)

        adapted, base = start_two(load, engine)
        os.kill(before[0], signal.SIGKILL)
        answers = engine.call("step", count=0)
        assert answers[adapted]["stop_reason"] is None
        assert answers[adapted]["tokens"] == peft(load, "fused", load.batch[0].prompt, LONG)
        assert answers[base]["tokens"] == peft(load, None, load.batch[0].prompt, LONG)
        after = {one.shard: one.pid for one in status(server.address).shards}
        assert not before.items() & after.items(), "both were started anew"
    finally:
        engine.close()


def test_policy_base_model(load, killable, scratch):
    """From the failure on the base model continues from the text so far, and the last output says so."""
    server = killable()
    settings = {"address": server.address, "on_failure": "base_model", "timeout_seconds": 5}
    engine = Engine(load.base, None, scratch / "engine-base.log", additional_config={"lora_server": settings})
    try:
        prompt = load.batch[0].prompt
        adapted, base = start_two(load, engine)
        kill(server)
        answers = engine.call("step", count=0)
        reply = answers[adapted]
        assert reply["finish_reason"] == "length" and len(reply["tokens"]) == LONG
        assert parse_flag(reply["stop_reason"])[:2] == ("base_model", "shard_unavailable")
        assert reply["extra"]["lora_server"]["answered_by"] == "base_model"
        expected = peft(load, "fused", prompt, LONG)
        same = next(i for i, (ours, theirs) in enumerate(zip(reply["tokens"], expected, strict=True)) if ours != theirs)
        assert same >= 5, "what was generated before the failure is the adapter's"
        continuations = [peft(load, None, prompt + reply["tokens"][:cut], LONG - cut) for cut in range(5, same + 1)]
        assert any(reply["tokens"][-len(rest) :] == rest for rest in continuations), "the rest is the base model's"
        assert answers[base]["tokens"] == peft(load, None, prompt, LONG)
        assert answers[base]["stop_reason"] is None

        reply = engine.generate([Sequence(prompt, "fused")], NEW_TOKENS)[0]
        assert reply["tokens"] == peft(load, None, prompt, NEW_TOKENS)
        assert parse_flag(reply["stop_reason"])[0] == "base_model"
        unknown = engine.generate([Sequence(prompt, "nobody")], NEW_TOKENS)[0]
        assert unknown["stop_reason"] is not None, "flagged, or an error: never silent"
        killable(server.address)
        load.check(engine.answers(load.batch, NEW_TOKENS), 1e-3)
        unknown = engine.generate([Sequence(prompt, "nobody")], NEW_TOKENS)[0]
        assert unknown["finish_reason"] == "error", "an unknown name is an error under either policy"
    finally:
        engine.close()


def test_kv_of_a_failed_step_is_never_reused(load, killable, scratch):
    """The prompt's blocks were cached under the adapter's version when its step failed."""
    prompt = [3 + i * 7 % 240 for i in range(300)]
    server = killable()
    engine = Engine(load.base, server.address, scratch / "engine-kv.log", IMPATIENT, max_num_batched_tokens=160)
    try:
        name = engine.call("add", request={"prompt": prompt, "adapter": "fused", "new_tokens": 8})
        engine.call("step", count=1)
        kill(server)
        assert engine.call("step", count=0)[name]["finish_reason"] == "error"
        killable(server.address)
        until(lambda: is_served(engine, Sequence(prompt[::-1], "fused")), "it has joined anew", HANG_SECONDS)
        reply = engine.generate([Sequence(prompt, "fused")], 8)[0]
        assert reply["cached"] == 0
        assert reply["tokens"] == peft(load, "fused", prompt, 8)
    finally:
        engine.close()


def test_an_engine_without_a_server_does_not_start(load, scratch):
    settings = {"address": "127.0.0.1:1", "timeout_seconds": 1}
    with pytest.raises(RuntimeError, match="cannot be reached"):
        Engine(load.base, None, scratch / "engine-none.log", additional_config={"lora_server": settings})
