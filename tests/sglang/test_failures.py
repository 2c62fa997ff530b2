"""Requests wait for a place; a shard, and then the whole server, dies in the middle of generations; prompts come in
chunks, and SGLang takes requests off their batch.

SGLang checks its KV cache for leaks whenever it is idle, and ends where it finds one.
"""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from lora_server.demo.engine import Sequence
from lora_server.demo.launch import launch
from tests.sglang.engines import SglangServer
from tests.support.serving import HANG_SECONDS, flags, kill, kill_shard, status, until
from tests.support.workload import NEW_TOKENS

LONG = 120


@pytest.fixture
def crowded(load, tmp_path):
    """Places for two adapters."""
    server = launch(tmp_path / "server.log", *flags(load, "--layout", "ep2-pp1", "--max-active-adapters", "2"))
    try:
        server.wait_ready()
        yield server
    finally:
        server.stop()


def test_requests_wait_for_places_outlive_a_shard_and_end_with_the_server(load, crowded, tmp_path):
    prompt, peft = load.batch[0].prompt, lambda name: load.answer(load.paths.get(name), prompt, LONG).tokens
    expected = {name: peft(name) for name in ("fused", "qv", None)}
    impatient = {"LORA_SERVER_TIMEOUT_SECONDS": "30"}
    with (
        SglangServer(load.base, crowded.address, tmp_path / "engine.log", **impatient) as engine,
        ThreadPoolExecutor() as pool,
    ):
        load.check(engine.answers(load.batch, NEW_TOKENS), 1e-3)  # six adapters, two at a time
        until(lambda: status(crowded.address).active == 0, "all places are back")

        calls = {name: pool.submit(engine.answer, prompt, name, LONG) for name in expected}
        until(lambda: decoding(crowded), "steps are served")
        kill_shard(crowded, 0)
        for name, call in calls.items():
            assert call.result(HANG_SECONDS) == expected[name], name

        calls = {name: pool.submit(engine.generate, [Sequence(prompt, name)], LONG) for name in expected}
        waiting = pool.submit(engine.generate, [Sequence(prompt, "attention")], LONG)
        until(lambda: decoding(crowded), "steps are served")
        kill(crowded)
        for name in ("fused", "qv"):
            code, reply = calls[name].result(HANG_SECONDS)
            assert code == 503 and (crowded.address in json.dumps(reply) or "shard" in json.dumps(reply)), reply
        assert waiting.result(HANG_SECONDS)[0] == 503
        assert calls[None].result(HANG_SECONDS)[1][0]["output_ids"] == expected[None]
        assert engine.answer(prompt, None, LONG) == expected[None]
        assert engine.generate([Sequence(prompt, "gate-up")], NEW_TOKENS)[0] == 503

        again = launch(tmp_path / "again.log", *flags(load, "--layout", "ep2-pp1", "--listen", crowded.address))
        try:
            again.wait_ready()
            until(lambda: engine.generate([load.batch[0]], 1)[0] == 200, "it has joined anew")
            load.check(engine.answers(load.batch, NEW_TOKENS), 1e-3)
        finally:
            again.stop()


def decoding(server) -> bool:
    """Whether two adapters are held."""
    return status(server.address).active == 2


def test_chunked_prompts_and_requests_that_are_taken_off_their_batch_equal_peft(load, server, tmp_path):
    """One chunk has rows of several requests, and every third step takes requests off the batch."""
    prompts = [[3 + (7 * i + 31 * one) % 240 for i in range(50)] for one in range(3)]
    batch = [Sequence(prompt, name) for prompt in prompts for name in ("fused", "qv", None)]
    retract = {"SGLANG_TEST_RETRACT": "true"}
    log = tmp_path / "engine.log"
    with SglangServer(load.base, server.address, log, "--chunked-prefill-size", "32", **retract) as engine:
        answers = engine.answers(batch, LONG)
    for sequence, answer in zip(batch, answers, strict=True):
        expected = load.answer(load.paths.get(sequence.adapter), sequence.prompt, LONG)
        assert answer.tokens == expected.tokens, sequence.adapter
    assert "Testing retraction" in log.read_text()


def test_a_request_that_sglang_ends_leaves_nothing_in_the_cache(load, engine):
    """SGLang ends a request for a bad grammar after a pass over the token 0, which is then cached under its key."""
    body = {
        "input_ids": load.batch[0].prompt,
        "lora_path": "fused",
        "sampling_params": {"max_new_tokens": 4, "json_schema": "{"},
    }
    assert engine.request("POST", "/generate", body)[0] == 400
    prompt = [0, *load.batch[0].prompt]
    assert engine.answer(prompt, "fused", NEW_TOKENS) == load.answer(load.paths["fused"], prompt).tokens
