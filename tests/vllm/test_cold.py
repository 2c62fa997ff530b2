"""A request of a cold adapter waits in vLLM's queue, and delays no token of requests whose adapters are loaded."""

import shutil
import statistics
import time

import pytest

from client_connector.serving.plan import parse_flag
from lora_server.demo.engine import Sequence
from lora_server.demo.launch import running_server
from tests.support.serving import listed, until
from tests.support.workload import NEW_TOKENS
from tests.vllm.engines import Engine

LOAD_SECONDS, LONG = 2.0, 900
WARM, COLD, DAMAGED = ("qv", "attention"), "experts", "fused"


@pytest.fixture(scope="module")
def slow(load, scratch):
    """A server that loads COLD in LOAD_SECONDS, with room for WARM and one other."""
    sizes = {name: sum(file.stat().st_size for file in path.glob("*.safetensors")) for name, path in load.paths.items()}
    pool = round(1.1 * sum(sizes[name] for name in (*WARM, DAMAGED)))
    gbps = sizes[COLD] * 8e-9 / LOAD_SECONDS
    more = ["--device-pool", str(pool), "--host-pool", "0", "--dtype", "float32", "--host-link-gbps", f"{gbps:.9f}"]
    folder = scratch / "slow"
    for name in (*WARM, COLD, DAMAGED):
        shutil.copytree(load.paths[name], folder / name)
    own = ["--base-model", str(load.base), "--adapters", str(folder), *more]
    with running_server(scratch / "server-slow.log", own) as server:
        yield server, folder


@pytest.fixture(scope="module")
def engine(load, slow, scratch):
    with Engine(load.base, slow[0].address, scratch / "engine-slow.log") as engine:
        yield engine


def stepped(engine, seen, end):
    """Make steps until that many, or until one request has a token or its end; their seconds."""
    seconds = []
    while not (len(seconds) == end if isinstance(end, int) else end in seen):
        began = time.monotonic()
        seen |= engine.call("step", count=1)
        seconds.append(time.monotonic() - began)
    return seconds


def test_other_requests_get_their_tokens_while_an_adapter_loads(load, slow, engine):
    server, _ = slow
    prompt, seen = load.batch[0].prompt, {}
    engine.generate([Sequence(prompt, name) for name in (*WARM, DAMAGED)], 1)  # COLD makes place for these
    warm = [engine.add(prompt, name, LONG) for name in WARM]
    stepped(engine, seen, warm[0]), stepped(engine, seen, warm[1])
    until(lambda: listed(server.address)[COLD].state == "disk", "it is on disk alone")
    alone, before = stepped(engine, seen, 20), len(seen[warm[0]]["tokens"])
    cold = engine.add(prompt, COLD, NEW_TOKENS)
    beside = stepped(engine, seen, cold)
    assert sum(beside) > 0.8 * LOAD_SECONDS, "it was cold"
    assert len(seen[warm[0]]["tokens"]) - before >= len(beside) - 1, "each step gave a token"
    assert max(beside) < LOAD_SECONDS / 2 and statistics.median(beside) < 3 * statistics.median(alone)
    seen |= engine.call("step", count=NEW_TOKENS)
    assert seen[cold]["finish_reason"] == "length" and engine.call("scheduler")["preemptions"] == 0
    for one in warm:
        engine.call("abort", name=one)
    (again,) = engine.generate([Sequence(prompt, COLD)], NEW_TOKENS)
    assert again["tokens"] == seen[cold]["tokens"]


def test_a_load_that_fails_ends_its_own_request_by_name(load, slow, engine):
    _, folder = slow
    prompt, seen = load.batch[0].prompt, {}
    warm = engine.add(prompt, WARM[0], LONG)
    stepped(engine, seen, warm)
    (folder / DAMAGED / "adapter_model.safetensors").unlink()
    cold = engine.add(prompt, DAMAGED, NEW_TOKENS)
    stepped(engine, seen, cold)
    outcome, _, message = parse_flag(seen[cold]["stop_reason"])
    assert outcome == "error" and f"adapter {DAMAGED!r}" in message
    before = len(seen[warm]["tokens"])
    stepped(engine, seen, 5)
    assert len(seen[warm]["tokens"]) == before + 5 and seen[warm]["finish_reason"] is None
    engine.call("abort", name=warm)
