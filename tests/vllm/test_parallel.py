"""Tensor and expert parallelism: each rank asks for its columns, and for its experts, only."""

from __future__ import annotations

import os
import signal

import pytest
from engines import Engine

from client_connector.serving.plan import parse_flag
from tests.serving import status, until
from tests.workload import NEW_TOKENS

TP2 = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
PP2 = {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"}
LONG = 40


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"], indirect=True)
def test_tensor_parallel(load, kind, server, scratch):
    """Equal to PEFT; a shard that dies voids the step on both ranks, and the engine lives."""
    engine = Engine(load.base, server.address, scratch / f"engine-{kind}-tp2.log", **TP2)
    try:
        until(lambda: status(server.address).clients == 3, "two ranks and the scheduler")
        load.check(engine.answers(load.batch, NEW_TOKENS), 1e-3)
        assert engine.log.read_text().count("attached to the LoRA server") == 1, "not once per rank"
        adapted = engine.call("add", request={"prompt": load.batch[0].prompt, "adapter": "fused", "new_tokens": LONG})
        base = engine.call("add", request={"prompt": load.batch[0].prompt, "adapter": None, "new_tokens": LONG})
        engine.call("step", count=4)
        os.kill(status(server.address).shards[0].pid, signal.SIGKILL)
        answers = engine.call("step", count=0)
        assert parse_flag(answers[adapted]["stop_reason"])[0] == "error"
        assert (answers[base]["finish_reason"], len(answers[base]["tokens"])) == ("length", LONG)
        until(lambda: status(server.address).ready and status(server.address).shards[0].restarts == 1, "it is back")
        load.check(engine.answers(load.batch, NEW_TOKENS), 1e-3)
    finally:
        engine.close()
    until(lambda: status(server.address).clients == 0, "all have left")


def test_expert_parallel(load, server, scratch):
    engine = Engine(load.base, server.address, scratch / "engine-ep.log", **TP2, enable_expert_parallel=True)
    try:
        load.check(engine.answers(load.batch, NEW_TOKENS), 1e-3)
    finally:
        engine.close()


def test_what_is_not_supported_is_refused_at_start(load, server, scratch):
    with pytest.raises(RuntimeError, match="pipeline_parallel_size: got 2, expected 1"):
        Engine(load.base, server.address, scratch / "engine-pp.log", **PP2)
