"""An adapter whose files are damaged at any byte is refused by name, or can be read whole."""

import json
import struct

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lora_server.adapters import validate_adapter
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
