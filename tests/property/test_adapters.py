"""An adapter whose files are damaged at any byte is refused by name, or can be read whole. Patterns match as PEFT's."""

import json
import struct
import time

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from peft.utils.other import get_pattern_key

from lora_server.adapters import validate_adapter
from lora_server.adapters.patterns import Patterns
from lora_server.demo import tiny
from lora_server.errors import AdapterFormatError
from tests.support.adapter_files import CONFIG, good, read_all, refused, spec_of, weights_of


@pytest.fixture(scope="module")
def damaged(tmp_path_factory):
    """(the adapter's directory, how to write its two files, the good content of its weights)."""
    path = tmp_path_factory.mktemp("damaged")
    tiny.write_adapter(path, good(), CONFIG)
    config, weights = path / "adapter_config.json", path / "adapter_model.safetensors"
    texts = config.read_bytes(), weights.read_bytes()

    def write(weights_bytes, config_bytes=texts[0]):
        weights.write_bytes(weights_bytes)
        config.write_bytes(config_bytes)

    return path, write, texts[1]


def refused_or_whole(path):
    try:
        adapter, _ = validate_adapter(path, spec_of())
    except AdapterFormatError as error:
        assert str(path) in str(error)
        return
    with adapter:
        assert all(torch.isfinite(tensor).all() for tensor in read_all(adapter))


@settings(max_examples=100)
@example(1.0)
@example(0.0)
@given(st.floats(0, 1))
def test_a_file_cut_at_any_byte_is_refused(damaged, share):
    path, write, content = damaged
    for cut in {int(share * (len(content) - 1)), int(share * 8)}:  # in the whole, and in the length of its header
        write(content[:cut])
        refused(path, "adapter_model.safetensors" if cut < 8 else "")


@settings(max_examples=200)
@given(data=st.data())
def test_flipped_bytes_give_a_refusal_or_a_readable_adapter(damaged, data):
    path, write, content = damaged
    header_end = 8 + struct.unpack("<Q", content[:8])[0]
    where = st.one_of(st.integers(0, 7), st.integers(8, header_end - 1), st.integers(header_end, len(content) - 1))
    flipped = bytearray(content)
    for at, mask in data.draw(st.lists(st.tuples(where, st.integers(1, 255)), min_size=1, max_size=4)):
        flipped[at] ^= mask
    write(flipped)
    refused_or_whole(path)


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
TREES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
)


@settings(max_examples=150)
@given(
    text=st.binary(max_size=200) | TREES.map(lambda tree: json.dumps(tree).encode()),
    field=st.sampled_from(["", "header", "rank_pattern", *CONFIG]),
)
def test_odd_json_gives_a_refusal_or_a_readable_adapter(damaged, text, field):
    path, write, content = damaged
    if field == "header":
        write(weights_of(text, content[-500:]))
    elif field:
        fields = json.dumps({**CONFIG, "peft_type": "LORA", field: "?"}).encode()
        write(content, fields.replace(b'"?"', text))
    else:
        write(content, text)
    refused_or_whole(path)


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
