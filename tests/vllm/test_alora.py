"""Activated LoRAs in a real engine against PEFT's aLoRA, and KV prefixes shared with the base model both ways."""

import pytest

from client_connector.serving.plan import parse_flag
from lora_server.demo import tiny
from lora_server.demo.engine import EngineAnswer, Sequence
from tests.support import alora
from tests.support.serving import settled_steps, status
from tests.support.workload import NEW_TOKENS

BLOCK = 128


@pytest.fixture(scope="module")
def paths(load, directory, tmp_path_factory):
    root = tmp_path_factory.mktemp("alora")
    made = alora.make(load.model, root)
    tiny.make_adapter(load.model, root / "second", seed=90, lora_rank=4, targets="attention", invocation=alora.CALL)
    made |= {"second": root / "second", "legacy": alora.make_legacy(load.model, root / "legacy")}
    for name, path in made.items():
        directory.add(name, str(path))
    return made


def run(engine, prompt: list[int], name: str | None):
    return engine.generate([Sequence(prompt, name)], NEW_TOKENS)[0]


def check(load, paths, reply, prompt: list[int], name: str | None) -> None:
    expected = alora.answer(load.model, paths, Sequence(prompt, name))
    assert reply["tokens"] == expected.tokens, name
    assert max(abs(a - b) for a, b in zip(reply["logprobs"], expected.logprobs, strict=True)) <= 1e-3, name


def test_tokens_equal_peft(load, engine, paths):
    """Invoked in the middle, at both ends, twice; not at all is the base model, and said so."""
    case = alora.case(load.model, paths)
    replies = engine.generate(case.batch, NEW_TOKENS)
    case.check([EngineAnswer(reply["tokens"], reply["logprobs"]) for reply in replies])
    names = [*alora.prompts(), "plain", None, "rewrite"]
    flags = dict(zip(names, [reply["stop_reason"] for reply in replies], strict=True))
    assert {name for name, flag in flags.items() if flag is not None} == {"cut off", "absent"}
    assert parse_flag(flags["absent"])[:2] == ("base_model", "not_invoked")


def test_the_legacy_string_uses_the_engines_tokenizer(load, engine, paths):
    prompt = alora.prompts()["middle"]
    assert run(engine, prompt, "legacy")["tokens"] == alora.answer(load.model, paths, Sequence(prompt, "check")).tokens


def test_prefixes_are_shared_both_ways(load, engine, paths):
    """base -> aLoRA -> base, and two more adapters over one context."""
    text = alora.words(11, 3 * BLOCK + 20)
    called = [*text, *alora.CALL]
    base = run(engine, text, None)
    assert base["cached"] == 0
    first = run(engine, called, "check")
    assert first["cached"] == 3 * BLOCK, "the base model's blocks"
    check(load, paths, first, called, "check")
    second = run(engine, called, "second")
    assert second["cached"] == 3 * BLOCK, "another adapter over the same context"
    check(load, paths, second, called, "second")
    ordinary = run(engine, called, "plain")
    assert ordinary["cached"] == 0, "an ordinary LoRA acts everywhere"
    check(load, paths, ordinary, called, "plain")

    fresh = alora.words(12, 2 * BLOCK + 9)
    called = [*fresh, *alora.CALL]
    check(load, paths, run(engine, called, "check"), called, "check")
    after = run(engine, fresh, None)
    assert after["cached"] == 2 * BLOCK, "the base model reuses what the adapter's request computed"
    check(load, paths, after, fresh, None)


def test_blocks_after_the_invocation_are_the_adapters(load, engine, paths):
    """A prompt whose invocation lies in its first block shares that block, and later ones, with nobody else."""
    prompt = [*alora.words(13, 40), *alora.CALL, *alora.words(14, 2 * BLOCK)]
    for name in ("check", None, "second", "plain"):
        reply = run(engine, prompt, name)
        assert reply["cached"] == 0, name
        check(load, paths, reply, prompt, name)
    again = run(engine, prompt, "check")
    assert again["cached"] == 2 * BLOCK
    check(load, paths, again, prompt, "check")


def test_rows_before_the_invocation_never_leave_the_engine(engine, server, paths):
    """An attention adapter on 4 layers: one entry per row and site, in prefill and in each decoding step."""

    def entries() -> int:
        settled_steps(server.address)
        return sum(shard.stats.entries for shard in status(server.address).shards)

    before = entries()
    run(engine, [*alora.words(15, 60), *alora.CALL], "check")
    rows = len(alora.CALL) + NEW_TOKENS - 1
    assert entries() - before == rows * 4 * 2
