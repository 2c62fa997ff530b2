"""Tensor and expert parallelism: each rank asks for its columns, and for its experts, only."""

import os
import signal

import pytest

from lora_server.demo.engine import Sequence
from tests.support.serving import settled_steps, status, until
from tests.support.workload import NEW_TOKENS
from tests.vllm.engines import Engine

TP2 = {"fresh": True, "tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
PP2 = {"fresh": True, "pipeline_parallel_size": 2, "distributed_executor_backend": "mp"}
LONG = 40


@pytest.mark.parametrize("kind", ["gpt_oss"], indirect=True)
def test_tensor_parallel(load, server, scratch):
    """Equal to PEFT; a shard that dies voids the step on both ranks, which is computed anew, and the engine lives."""

    def add_two() -> list[str]:
        return [engine.add(load.batch[0].prompt, name, LONG) for name in ("fused", None)]

    def finish(requests: list[str]) -> list[tuple[list[int], str, str | None]]:
        answers = engine.call("step", count=0)
        ended = [answers[request] for request in requests]
        return [(one["tokens"], one["finish_reason"], one["stop_reason"]) for one in ended]

    with Engine(load.base, server.address, scratch / "engine-tp2.log", **TP2) as engine:
        until(lambda: status(server.address).clients == 3, "two ranks and the scheduler")
        load.check(engine.answers(load.batch, NEW_TOKENS), 1e-3)
        assert engine.log.read_text().count("attached to the LoRA server") == 1, "not once per rank"
        calm = finish(add_two())
        assert calm[0][0][:NEW_TOKENS] == load.expected[0].tokens and calm[0] != calm[1]
        two = add_two()
        engine.call("step", count=4)
        os.kill(status(server.address).shards[0].pid, signal.SIGKILL)
        assert finish(two) == calm and [one[1:] for one in calm] == [("length", None)] * 2
        until(lambda: status(server.address).ready and status(server.address).shards[0].restarts == 1, "it is back")
        load.check(engine.answers(load.batch, NEW_TOKENS), 1e-3)
    until(lambda: status(server.address).clients == 0, "all have left")


def test_expert_parallel(load, server, scratch):
    """Attention by columns, experts whole."""
    with Engine(load.base, server.address, scratch / "engine-ep.log", **TP2, enable_expert_parallel=True) as engine:
        load.check(engine.answers(load.batch, NEW_TOKENS), 1e-3)


@pytest.mark.parametrize(
    "more", [{}, pytest.param({"enable_expert_parallel": True}, marks=pytest.mark.long)], ids=["tensor", "expert"]
)
def test_merged_weights(load, server, merged, scratch, more):
    """Each rank gets minus the merged adapter's delta for its columns and its experts."""
    with Engine(merged[0], server.address, scratch / "engine-merged-tp2.log", **TP2, **more) as engine:
        load.check(engine.answers(load.batch, NEW_TOKENS), 1e-3)
        before = settled_steps(server.address)
        (reply,) = engine.generate([Sequence(load.batch[0].prompt, "fused")], NEW_TOKENS, merged[1])
        assert reply["tokens"] == load.answer(load.paths["fused"], load.batch[0].prompt).tokens
        assert settled_steps(server.address) == before


def test_what_is_not_supported_is_refused_at_start(load, server, scratch):
    with pytest.raises(RuntimeError, match="pipeline_parallel_size: got 2, expected 1"):
        Engine(load.base, server.address, scratch / "engine-pp.log", **PP2)
