"""A vLLM engine on base weights with a hot adapter in them, against PEFT, and through the end of its server.

LORA_AWAY_SECONDS=30 has the server stay away for as long as the bar asks for.
"""

import os
import time

import pytest

from client_connector.serving.plan import parse_flag
from lora_server.demo import tiny
from lora_server.demo.engine import EngineAnswer, Sequence
from tests.support import alora
from tests.support.serving import ANYWHERE, HANG_SECONDS, ask, kill, settled_steps, status
from tests.support.workload import NEW_TOKENS
from tests.vllm.engines import Engine

IN_ORDER = True  # adapters are added, and one is updated; the last tests end the server
HOT = "fused"
BLOCK, LONG = 128, 40
AWAY_SECONDS = float(os.environ.get("LORA_AWAY_SECONDS", "0"))


@pytest.fixture(scope="module")
def own_flags(scratch):
    """Flags of all servers here, which have one registry."""
    return ("--layout", "ep2-pp2", *ANYWHERE, "--data-dir", str(scratch / "merged-data"))


@pytest.fixture(scope="module")
def server(servers, own_flags):
    return servers.start(*own_flags)


@pytest.fixture(scope="module")
def engine(merged, server, scratch):
    patient = {"LORA_SERVER_TIMEOUT_SECONDS": str(2 * HANG_SECONDS + AWAY_SECONDS)}
    with Engine(merged[0], server.address, scratch / "engine-merged.log", patient) as running:
        yield running


@pytest.fixture(scope="module")
def long_prompt():
    return alora.words(21, 2 * BLOCK + 9)


def run(engine, prompt, name, path="by-name"):
    (reply,) = engine.generate([Sequence(prompt, name)], NEW_TOKENS, path)
    assert reply["stop_reason"] is None, reply["stop_reason"]
    return reply


def test_tokens_of_hot_cold_and_base_rows_equal_peft(load, engine):
    load.check(engine.answers(load.batch, NEW_TOKENS), 1e-3)


def test_rows_before_an_invocation_are_the_base_models(load, directory, engine, tmp_path_factory):
    paths = alora.make(load.model, tmp_path_factory.mktemp("alora"))
    for name, path in paths.items():
        directory.add(name, str(path))
    case = alora.case(load.model, paths)
    replies = engine.generate(case.batch, NEW_TOKENS)
    case.check([EngineAnswer(reply["tokens"], reply["logprobs"]) for reply in replies])
    absent = replies[list(alora.prompts()).index("absent")]
    assert parse_flag(absent["stop_reason"])[:2] == ("base_model", "not_invoked")


def test_a_fallback_to_the_base_model_is_refused_at_the_start(merged, server, scratch):
    with pytest.raises(RuntimeError, match=f"weights that contain {HOT}"):
        Engine(merged[0], server.address, scratch / "refused.log", {"LORA_SERVER_ON_FAILURE": "base_model"})


def test_hot_requests_send_nothing(load, server, merged, engine):
    before = settled_steps(server.address)
    prompt = load.batch[0].prompt
    assert run(engine, prompt, HOT, merged[1])["tokens"] == load.answer(load.paths[HOT], prompt).tokens
    assert settled_steps(server.address) == before


def test_kv_blocks_of_the_merged_version_are_its_own(load, merged, engine, long_prompt):
    for name, path in ((HOT, merged[1]), (None, "by-name"), ("attention", "by-name")):
        first, again = (run(engine, long_prompt, name, path) for _ in range(2))
        assert (first["cached"], again["cached"]) == (0, 2 * BLOCK), name
        assert first["tokens"] == again["tokens"] == load.answer(load.paths.get(name), long_prompt).tokens, name


def test_an_update_makes_the_merged_version_a_cold_one_which_is_held(
    load, server, merged, engine, long_prompt, tmp_path_factory
):
    """The front end names each request's version: earlier requests end with the one in the weights."""
    new = tmp_path_factory.mktemp("new")
    tiny.make_adapter(load.model, new, seed=77, lora_rank=3, targets="all")
    version = ask(server.address, "Update", name=HOT, uri=str(new), wait_seconds=HANG_SECONDS).version
    updated = run(engine, long_prompt, HOT, f"lora_server:{HOT}@{version}")
    assert (updated["cached"], updated["tokens"]) == (0, load.answer(new, long_prompt).tokens)
    for name, path in ((HOT, merged[1]), (None, "by-name"), ("attention", "by-name")):
        expected = load.answer(load.paths.get(name), load.batch[0].prompt)
        assert run(engine, load.batch[0].prompt, name, path)["tokens"] == expected.tokens, name
    check_draining(server.address, merged, version)


def check_draining(address, merged, serves):
    """One client, the engine's scheduler, holds the version in the weights, and its name means another."""
    (draining,) = status(address).draining
    assert (draining.name, f"lora_server:{HOT}@{draining.version}") == (HOT, merged[1])
    assert (len(draining.clients), draining.serves) == (1, serves)


def test_hot_requests_do_not_notice_that_the_server_is_away(load, servers, own_flags, server, merged, engine):
    """Each step gives a hot request a token, while one of the base model waits. That one is served by a server that
    comes back, where the name means another version by then."""
    prompt, (was,) = load.batch[0].prompt, status(server.address).draining
    base, hot = engine.add(prompt, None, LONG), engine.add(prompt, HOT, LONG, merged[1])
    engine.call("step", count=4)
    kill(server)
    gone = time.monotonic()
    while True:
        made = []
        while not made or len(made[-1]["tokens"]) < LONG:
            seen = engine.call("step", count=1)
            assert base not in seen or seen[base]["finish_reason"] is None
            made.append(seen[hot])
        assert [len(one["tokens"]) for one in made] == list(range(len(made[0]["tokens"]), LONG + 1))
        assert made[-1]["tokens"] == load.answer(load.paths[HOT], prompt, LONG).tokens
        assert (made[-1]["finish_reason"], made[-1]["stop_reason"]) == ("length", None)
        if time.monotonic() >= gone + AWAY_SECONDS:
            break
        hot = engine.add(prompt, HOT, LONG, merged[1])
    servers.start(*own_flags, "--listen", server.address)
    served = engine.call("step", count=0)[base]
    assert (served["tokens"], served["stop_reason"]) == (load.answer(None, prompt, LONG).tokens, None)
    check_draining(server.address, merged, was.serves)


def test_other_requests_end_with_an_error_where_the_server_stays_away(load, servers, server, merged, scratch):
    """Also those of an activated LoRA that was not invoked, which are the base model's."""
    with Engine(merged[0], server.address, scratch / "impatient.log", {"LORA_SERVER_TIMEOUT_SECONDS": "10"}) as engine:
        requests = [engine.add(load.batch[0].prompt, name, LONG) for name in (None, "check")]
        engine.call("step", count=4)
        kill(servers.all[-1])
        ended = engine.call("step", count=0)
    for request in requests:
        assert ended[request]["finish_reason"] == "error"
        assert parse_flag(ended[request]["stop_reason"])[:2] == ("error", "shard_unavailable")
