"""Model families in a real SGLang, against PEFT: all formats of adapters and base rows in one batch.

Not GPT-OSS, whose experts SGLang computes by kernels for GPUs.
"""

import pytest

from tests.support.serving import settled_steps
from tests.support.workload import NEW_TOKENS


@pytest.mark.parametrize("kind", ["llama", "mixtral", "qwen3_moe"], indirect=True)
def test_one_batch_of_all_formats_equals_peft_and_each_alone(load, server, engine):
    load.check(engine.answers(load.batch, NEW_TOKENS), 1e-3)
    for sequence, expected in zip(load.batch, load.expected, strict=True):
        assert engine.answer(sequence.prompt, sequence.adapter, NEW_TOKENS) == expected.tokens, sequence.adapter
    before = settled_steps(server.address)
    base = [sequence for sequence in load.batch if sequence.adapter is None]
    assert engine.answers(base, NEW_TOKENS)[0].tokens == load.expected[load.names.index(None)].tokens
    assert settled_steps(server.address) == before, "rows of the base model never leave the engine"
