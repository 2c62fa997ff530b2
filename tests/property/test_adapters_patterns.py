"""rank_pattern and alpha_pattern match as in PEFT, whatever the order and the kind of the patterns."""

import time

from hypothesis import given, settings
from hypothesis import strategies as st
from peft.utils.other import get_pattern_key

from lora_server.adapters.patterns import Patterns

MODULES = [
    f"model.layers.{layer}.{name}"
    for layer in (0, 1, 10, 11, 101)
    for name in (
        "self_attn.q_proj", "mlp.up_proj", "mlp.experts.gate_up_proj", "mlp.experts.1.w1", "mlp.experts.11.w3",
        "block_sparse_moe.experts.101.w2", "mlp.experts.10.gate_proj",
    )
]  # fmt: skip
PIECES = ["model", "layers", "0", "1", "10", "mlp", "experts", "w1", "q_proj", "gate_up_proj", "up_proj", "q.proj", "q"]
PIECES += [".*", "[01]", r"\d+", "(w1|w3)", "^model", "1.1", "_proj", "gate_proj$"]
PIECES += ["(w|1)+", "(?:[a-z]+_?)*", r"[^\d.]+", r"\w{2,4}", ".*?", r"(?:q|k)_proj", r"\bmlp\b", ""]
PATTERNS = st.one_of(
    st.lists(st.sampled_from(PIECES), min_size=1, max_size=4).map(".".join),
    st.lists(st.sampled_from(PIECES), min_size=1, max_size=4).map(r"\.".join),
    st.sampled_from(MODULES),
    st.tuples(st.sampled_from(MODULES), st.integers(1, 5)).map(lambda cut: ".".join(cut[0].split(".")[cut[1] :])),
).filter(bool)


@settings(max_examples=150, deadline=None)
@given(st.lists(PATTERNS, unique=True, max_size=8))
def test_the_first_match_is_pefts(patterns):
    values = {pattern: number for number, pattern in enumerate(patterns)}
    ours = Patterns("rank_pattern", values)
    for module in MODULES:
        assert ours.first(module) == values.get(get_pattern_key(values, module)), module


def test_a_pattern_for_each_of_many_experts_is_looked_up_and_not_searched():
    modules = [f"model.layers.{layer}.mlp.experts.{e}.up_proj" for layer in range(48) for e in range(128)]
    patterns = Patterns("rank_pattern", {module.replace(".", r"\."): e for e, module in enumerate(modules)})
    begin = time.process_time()
    assert [patterns.first(module) for module in modules] == list(range(len(modules)))
    assert time.process_time() - begin < 5
