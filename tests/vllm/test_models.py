"""Every model family in a real engine: fused and per-expert adapters, attention, base rows, in one batch."""

import pytest

from lora_server.demo import tiny
from tests.support.serving import settled_steps
from tests.support.workload import NEW_TOKENS


@pytest.mark.parametrize("kind", tiny.KINDS, indirect=True)
def test_one_batch_of_all_formats_equals_peft_and_each_alone(load, engine):
    load.check(engine.answers(load.batch, NEW_TOKENS), 1e-3)
    for index, sequence in enumerate(load.batch):
        reply = engine.generate([sequence], NEW_TOKENS)[0]
        assert reply["tokens"] == load.expected[index].tokens, sequence.adapter


def test_base_batches_cost_the_server_nothing(load, server, engine):
    before = settled_steps(server.address)
    base = [sequence for sequence in load.batch if sequence.adapter is None]
    assert engine.generate(base, NEW_TOKENS)[0]["tokens"] == load.expected[load.names.index(None)].tokens
    assert settled_steps(server.address) == before
