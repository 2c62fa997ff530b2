"""The server dies in the middle of a generation, and stays away: requests end with a clear error after a while, or the
base model answers them and they say so. The engine lives. tests/vllm/test_undisturbed.py has servers that come back."""

import os
import subprocess
import sys

import pytest

from client_connector.serving.plan import parse_flag
from lora_server.demo.engine import Sequence
from tests.support.serving import HANG_SECONDS, kill, until
from tests.support.workload import NEW_TOKENS
from tests.vllm.engines import ENVIRONMENT, START_SECONDS, Engine

LONG = 40
IMPATIENT = {"LORA_SERVER_TIMEOUT_SECONDS": "10"}  # on a busy machine, too
LAYOUT = ("--layout", "ep2-pp1")


def start_two(load, engine) -> tuple[str, str]:
    """A request with an adapter and one without, both decoding."""
    adapted, base = (engine.add(load.batch[0].prompt, name, LONG) for name in ("fused", None))
    engine.call("step", count=6)
    return adapted, base


def peft(load, name: str | None, prompt: list[int], new_tokens: int) -> list[int]:
    return load.answer(load.paths.get(name), prompt, new_tokens).tokens


def test_policy_error(load, servers, scratch):
    """Base rows are not touched. The blocks of a prompt that is half computed, which are cached under the adapter's
    version, are never used again."""
    text = [3 + i * 7 % 240 for i in range(300)]
    server = servers.start(*LAYOUT)
    log = scratch / "engine-error.log"
    with Engine(load.base, server.address, log, IMPATIENT, max_num_batched_tokens=160) as engine:
        adapted, base = start_two(load, engine)
        half = engine.add(text, "fused", NEW_TOKENS)
        engine.call("step", count=1)
        kill(server)
        answers = engine.call("step", count=0)
        for name in (adapted, half):
            assert answers[name]["finish_reason"] == "error"
            outcome, code, message = parse_flag(answers[name]["stop_reason"])
            assert (outcome, code) == ("error", "shard_unavailable"), message
            assert "shard" in message and "closed" in message
        assert answers[base]["tokens"] == peft(load, None, load.batch[0].prompt, LONG)

        reply = engine.generate([Sequence(load.batch[0].prompt, "fused")], NEW_TOKENS)[0]
        assert reply["finish_reason"] == "error" and "server_unavailable" in reply["stop_reason"]
        servers.start(*LAYOUT, "--listen", server.address)
        until(lambda: is_served(engine, load.batch[0]), "it has joined anew", HANG_SECONDS)
        load.check(engine.answers(load.batch, NEW_TOKENS), 1e-3)
        reply = engine.generate([Sequence(text, "fused")], NEW_TOKENS)[0]
        assert (reply["cached"], reply["tokens"]) == (0, peft(load, "fused", text, NEW_TOKENS))


def is_served(engine, sequence):
    return engine.generate([sequence], 1)[0]["stop_reason"] is None


def test_policy_base_model(load, servers, scratch):
    """From the failure on the base model continues from the text so far, and the last output says so."""
    server = servers.start(*LAYOUT)
    settings = {"address": server.address, "on_failure": "base_model", "timeout_seconds": 5}
    with Engine(load.base, None, scratch / "engine-base.log", additional_config={"lora_server": settings}) as engine:
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
        servers.start(*LAYOUT, "--listen", server.address)
        load.check(engine.answers(load.batch, NEW_TOKENS), 1e-3)
        unknown = engine.generate([Sequence(prompt, "nobody")], NEW_TOKENS)[0]
        assert unknown["finish_reason"] == "error", "an unknown name is an error under either policy"


@pytest.mark.parametrize(("address", "words"), [
    ("127.0.0.1:1", "server 127.0.0.1:1: cannot be reached (Connection refused); is it running?"),
    ("127.0.0.1", "LORA_SERVER_ADDRESS: got '127.0.0.1', expected HOST:PORT such as 127.0.0.1:7400"),
])  # fmt: skip
def test_a_start_without_a_server_ends_with_one_line(load, address, words):
    """The front end asks before it starts workers. Plugins are loaded by EngineArgs."""
    code = "import sys; from vllm.engine.arg_utils import EngineArgs; EngineArgs(sys.argv[1]).create_engine_config()"
    more = {"LORA_SERVER_ADDRESS": address, "LORA_SERVER_TIMEOUT_SECONDS": "1"}
    command = [sys.executable, "-c", code, str(load.base)]
    environment = os.environ | ENVIRONMENT | more
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=START_SECONDS, check=False)
    assert (done.returncode, "Traceback" in done.stderr) == (1, False), done.stderr
    assert done.stderr.splitlines()[-1].startswith(f"lora-server: {words}")


def test_an_engine_without_a_server_does_not_start(load, scratch):
    settings = {"address": "127.0.0.1:1", "timeout_seconds": 1}
    with pytest.raises(RuntimeError, match="cannot be reached"):
        Engine(load.base, None, scratch / "engine-none.log", additional_config={"lora_server": settings})
