"""Activated LoRAs: the invocation, and the transformers connector against PEFT's aLoRA, token by token."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from client_connector.alora import invocation_start
from client_connector.transformers import attach
from lora_server import spec
from lora_server.demo import tiny
from lora_server.demo.engine import generate
from lora_server.demo.inproc import InprocServer
from lora_server.errors import ConfigError
from tests.support import alora
from tests.support.workload import NEW_TOKENS


@given(st.lists(st.integers(0, 2), max_size=12), st.lists(st.integers(0, 2), min_size=1, max_size=4))
def test_the_last_occurrence_counts(prompt, invocation):
    places = [i for i in range(len(prompt)) if prompt[i : i + len(invocation)] == invocation]
    assert invocation_start(prompt, invocation) == (max(places) if places else None)


@pytest.fixture(scope="module", params=["mixtral", "llama"])
def served(request, tmp_path_factory):
    root = tmp_path_factory.mktemp(request.param)
    model = tiny.make_model(request.param)
    tiny.save_model(model, root / "base")
    paths = alora.make(model, root / "adapters")
    server = InprocServer(spec.load(root / "base"), paths, layout="ep2-pp2", max_step_rows=24)
    yield model, paths, server
    server.close()


def test_tokens_equal_peft(served):
    model, paths, server = served
    case = alora.case(model, paths)
    names = [sequence.adapter for sequence in case.batch]
    with attach(model, server) as lora, lora.adapters(names):
        case.check(generate(model, case.batch, NEW_TOKENS), 1e-4)


def test_the_oracle_tells_prompts_apart(served):
    """Where it is invoked matters, and without an invocation it is the base model."""
    model, paths, _ = served
    prompts = alora.prompts()
    base = alora.answer(model, paths, alora.Sequence(prompts["absent"], None))
    assert alora.answer(model, paths, alora.Sequence(prompts["absent"], "check")).tokens == base.tokens
    middle = alora.Sequence(prompts["middle"], "check")
    everywhere = tiny.apply_literal(model, paths["check"])
    assert alora.answer(model, paths, middle).logprobs != generate(everywhere, [middle], NEW_TOKENS)[0].logprobs


def test_rows_before_the_invocation_never_leave_the_engine(served):
    model, _, server = served
    ids = torch.tensor([alora.prompts()["end"]])
    entries = []
    with attach(model, server) as lora:
        lora.observe(lambda times: entries.append(times.entries))
        with lora.adapters(["check"]):
            model(ids)
    assert set(entries) == {len(alora.CALL)}


def test_a_prompt_in_two_passes(served):
    """The invocation came in the first; its cache is the engine's own."""
    model, _, server = served
    whole = torch.tensor([alora.prompts()["middle"]])
    with attach(model, server) as lora, lora.adapters(["check"]):
        expected = model(whole).logits[:, -1]
        first = model(whole[:, :-1], use_cache=True)
        ours = model(whole[:, -1:], past_key_values=first.past_key_values).logits[:, -1]
    assert torch.allclose(ours, expected, atol=1e-4)


class Words:
    def encode(self, text, add_special_tokens):
        assert add_special_tokens is False
        return [int(word[1:]) for word in text.split()]


@pytest.mark.parametrize("field", ["invocation_string", "alora_invocation_string"])
def test_the_legacy_string(served, tmp_path, field):
    model, paths, server = served
    legacy = alora.make_legacy(model, tmp_path / "legacy", field)
    prompt = alora.Sequence(alora.prompts()["middle"], "check")
    expected = alora.answer(model, paths, prompt)
    server = InprocServer(server.placement.spec, {"legacy": legacy})
    with attach(model, server, tokenizer=Words()) as lora, lora.adapters(["legacy"]):
        assert generate(model, [prompt], NEW_TOKENS)[0].tokens == expected.tokens
    with attach(model, server) as lora, lora.adapters(["legacy"]), pytest.raises(ConfigError, match="tokenizer="):
        generate(model, [prompt], NEW_TOKENS)
    server.close()


def test_embeddings_alone_are_refused(served):
    model, _, server = served
    embeds = model.get_input_embeddings()(torch.tensor([[5, 6, 7]]))
    with attach(model, server) as lora, lora.adapters(["check"]), pytest.raises(ConfigError, match="input_ids"):
        model(inputs_embeds=embeds)
