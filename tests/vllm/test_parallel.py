"""Tensor and expert parallelism: each rank asks for its columns, and for its experts, only."""

from __future__ import annotations

import pytest
from engines import Engine

from tests.serving import status, until
from tests.workload import NEW_TOKENS

LAYOUTS = {"tp2": {}, "tp2-ep": {"enable_expert_parallel": True}}
TP2 = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"], indirect=True)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_equals_peft(load, kind, server, scratch, layout):
    engine = Engine(load.base, server.address, scratch / f"engine-{kind}-{layout}.log", **TP2, **LAYOUTS[layout])
    try:
        until(lambda: status(server.address).clients == 3, "two ranks and the scheduler")
        load.check(engine.answers(load.batch, NEW_TOKENS), 1e-3)
    finally:
        engine.close()
    until(lambda: status(server.address).clients == 0, "all have left")
