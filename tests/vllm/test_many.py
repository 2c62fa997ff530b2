"""Many names in one engine, mixed batches, chunked prefill, prefix caching, abort, preemption."""

import pytest
import torch

from client_connector.directory import AdapterDirectory
from lora_server.demo import tiny
from lora_server.demo.engine import Sequence
from tests.support.serving import until
from tests.support.workload import NEW_TOKENS
from tests.vllm.engines import Engine

NAMES = 200
BLOCK = 128
LEASES = "s.lora_server_leases"
WAITING = f"[{LEASES}.state(r.request_id).held.handle for r in s.waiting if {LEASES}.state(r.request_id)]"
ANNOUNCED = (
    f"(lambda s: [{LEASES}._driver.lookahead._said, {WAITING}])(llm.llm_engine.engine_core.engine_core.scheduler)"
)


@pytest.fixture(scope="module")
def many(load, directory, tmp_path_factory):
    """200 more names: 20 versions of different ranks, 10 names each."""
    root, targets = tmp_path_factory.mktemp("many"), ("experts", "attention", "all", "qv")
    for index in range(20):
        recipe = {"lora_rank": 1 + index % 5, "targets": targets[index % 4]}
        tiny.make_adapter(load.model, root / str(index), seed=100 + index, **recipe)
    for index in range(NAMES):
        directory.add(f"many-{index}", str(root / str(index % 20)))
    return {f"many-{index}": root / str(index % 20) for index in range(NAMES)}


def prompt(seed: int, length: int) -> list[int]:
    return torch.randint(3, 250, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def check(reply, expected, what: object = "") -> None:
    assert reply["tokens"] == expected.tokens, what
    assert max(abs(a - b) for a, b in zip(reply["logprobs"], expected.logprobs, strict=True)) <= 1e-3, what


def holders(directory: AdapterDirectory) -> int:
    return sum(adapter.holders for adapter in directory.list())


def test_two_hundred_names_in_one_engine(load, engine, many, directory):
    names = list(many)
    batch = [Sequence(prompt(index % 20, 6), name) for index, name in enumerate(names)]
    replies = engine.generate(batch, 4)
    for index in range(20):
        check(replies[index], load.answer(many[names[index]], batch[index].prompt, 4), names[index])
        for copy in range(index, NAMES, 20):
            assert replies[copy]["tokens"] == replies[index]["tokens"], (names[copy], names[index])
    until(lambda: holders(directory) == 0, "everything is released")


def test_prefixes_are_shared_within_a_version_only(load, engine, many):
    """many-0 and many-20 have the same content; KV keys also have the name, so each computes its own."""
    tokens = prompt(7, 2 * BLOCK + 9)
    seen = {}
    for name in (None, "fused", "many-0"):
        seen[name] = [engine.generate([Sequence(tokens, name)], NEW_TOKENS)[0] for _ in range(2)]
        assert [reply["cached"] for reply in seen[name]] == [0, 2 * BLOCK], name
        assert seen[name][0]["tokens"] == seen[name][1]["tokens"]
    check(seen["fused"][1], load.answer(load.paths["fused"], tokens))
    check(seen[None][1], load.answer(None, tokens))


def test_a_name_with_new_content_never_meets_old_kv(load, engine, directory, many, tmp_path):
    tokens = prompt(8, 2 * BLOCK + 5)
    paths = {}
    for version, seed in enumerate((71, 72)):
        paths[version] = tmp_path / str(version)
        tiny.make_adapter(load.model, paths[version], seed=seed, lora_rank=4, targets="all")
    directory.add("changing", str(paths[0]))
    check(engine.generate([Sequence(tokens, "changing")], NEW_TOKENS)[0], load.answer(paths[0], tokens))
    directory.remove("changing")
    directory.add("changing", str(paths[1]))
    reply = engine.generate([Sequence(tokens, "changing")], NEW_TOKENS)[0]
    assert reply["cached"] == 0
    check(reply, load.answer(paths[1], tokens))
    directory.remove("changing")


def test_an_unknown_name_fails_its_request_and_no_other(load, engine):
    good = Sequence(load.batch[0].prompt, load.batch[0].adapter)
    replies = engine.generate([good, Sequence(prompt(10, 8), "nobody"), good], NEW_TOKENS)
    assert [reply["finish_reason"] for reply in replies] == ["length", "error", "length"]
    assert "unknown_adapter" in replies[1]["stop_reason"] and "'nobody'" in replies[1]["stop_reason"]
    assert replies[1]["tokens"] == []
    check(replies[2], load.expected[0])


def test_add_lora_asks_the_server_and_the_engine_has_no_adapter_bytes(engine):
    """No parameter or buffer of the model has anything to do with LoRA."""
    assert engine.call("add_lora", name="fused") is True
    with pytest.raises(RuntimeError, match="not registered"):
        engine.call("add_lora", name="nobody")
    assert engine.generate([Sequence([5, 6, 7], "fused")], 2)[0]["finish_reason"] == "length"
    model = "llm.llm_engine.model_executor.driver_worker.worker.model_runner.model"
    names = f"[name for name, _ in [*{model}.named_parameters(), *{model}.named_buffers()] if 'lora' in name]"
    assert engine.call("evaluate", expression=names) == []


def test_chunked_prefill_and_preemption_equal_peft(load, server, directory, scratch):
    """Prompts in chunks of 48 beside decoding, and 6 blocks of KV for sequences that need 8."""
    names = ["fused", "experts", None, "attention"]
    batch = [Sequence(prompt(50 + index, 100 + index), name) for index, name in enumerate(names)]
    settings = {"max_num_batched_tokens": 48, "max_num_seqs": 8, "num_gpu_blocks_override": 7, "max_model_len": 256}
    with Engine(load.base, server.address, scratch / "engine-small.log", **settings) as engine:
        names = [engine.add(one.prompt, one.adapter, 60) for one in batch]
        engine.call("step", count=1)
        said, waiting = engine.call("evaluate", expression=ANNOUNCED)
        assert said == waiting and len(waiting) == 2, "the others with an adapter wait, and are announced in order"
        preempted, answers = 0, {}
        while engine.call("scheduler")["running"] or len(answers) < len(batch):
            stepped = engine.call("step", count=4)
            answers |= {name: reply for name, reply in stepped.items() if reply["finish_reason"] is not None}
            now = engine.call("scheduler")
            preempted = max(preempted, now["preemptions"])
        assert preempted > 0, "the test must preempt"
        for name, sequence in zip(names, batch, strict=True):
            path = None if sequence.adapter is None else load.paths[sequence.adapter]
            check(answers[name], load.answer(path, sequence.prompt, 60), sequence.adapter)
    until(lambda: holders(directory) == 0, "everything is released")
