"""Tensor parallelism: a scheduler on each of two ranks, and each asks for its columns only."""

import json
import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from lora_server.demo.engine import Sequence
from lora_server.demo.launch import launch
from tests.sglang.engines import SglangServer
from tests.support import alora
from tests.support.serving import ANYWHERE, HANG_SECONDS, ask, flags, kill, kill_shard, status, until
from tests.support.workload import NEW_TOKENS

CORES = sorted(os.sched_getaffinity(0))
BIND = {"SGLANG_CPU_OMP_THREADS_BIND": f"{CORES[0]}|{CORES[-1]}"}  # SGLang wants to know for more ranks than NUMA nodes
TP2 = ("--tp-size", "2")
LONG = 120


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"], indirect=True)
def test_one_batch_of_all_formats_equals_peft(load, server, tmp_path):
    with SglangServer(load.base, server.address, tmp_path / "engine.log", *TP2, **BIND) as engine:
        assert status(server.address).clients == 3, "two ranks, and the scheduler of the first"
        load.check(engine.answers(load.batch, NEW_TOKENS), 1e-3)
    until(lambda: status(server.address).clients == 0, "all have left")


def test_schedulers_agree_while_requests_wait_and_a_shard_and_the_server_die(load, tmp_path):
    """A rank that came to another batch than the other would hang both in their next all-reduce."""
    prompt, peft = load.batch[0].prompt, lambda name: load.answer(load.paths.get(name), prompt, LONG).tokens
    expected = {name: peft(name) for name in ("fused", "qv", None)}
    paths = alora.make(load.model, tmp_path)
    options = ("--layout", "ep2-pp1", "--max-active-adapters", "2", *ANYWHERE)
    crowded = launch(tmp_path / "server.log", *flags(load, *options))
    log = tmp_path / "engine.log"
    more = ("--chunked-prefill-size", "32")
    environment = BIND | {"LORA_SERVER_TIMEOUT_SECONDS": "30", "SGLANG_TEST_RETRACT": "true"}
    try:
        crowded.wait_ready()
        with (
            SglangServer(load.base, crowded.address, log, *TP2, *more, **environment) as engine,
            ThreadPoolExecutor() as pool,
        ):
            load.check(engine.answers(load.batch, NEW_TOKENS), 1e-3)  # six adapters, two at a time
            for name, path in paths.items():
                ask(crowded.address, "Add", name=name, uri=str(path))
            for name, invoked in alora.prompts().items():
                code, reply = engine.generate([Sequence(invoked, "check")], NEW_TOKENS)
                if name in ("cut off", "absent"):
                    assert code == 400 and "lacks its invocation" in json.dumps(reply)
                else:
                    wanted = alora.answer(load.model, paths, Sequence(invoked, "check")).tokens
                    assert reply[0]["output_ids"] == wanted, name

            calls = {name: pool.submit(engine.answer, prompt, name, LONG) for name in expected}
            until(lambda: status(crowded.address).active == 2, "steps are served")
            kill_shard(crowded, 0)
            for name, call in calls.items():
                assert call.result(HANG_SECONDS) == expected[name], name
            assert "Testing retraction" in log.read_text()

            calls = {name: pool.submit(engine.generate, [Sequence(prompt, name)], LONG) for name in expected}
            until(lambda: status(crowded.address).active == 2, "steps are served")
            kill(crowded)
            for name in ("fused", "qv"):
                assert calls[name].result(HANG_SECONDS)[0] == 503
            assert calls[None].result(HANG_SECONDS)[1][0]["output_ids"] == expected[None]
            assert engine.answer(prompt, None, LONG) == expected[None]
    finally:
        crowded.stop()
