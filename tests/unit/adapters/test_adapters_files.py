"""Files, headers and directories that are not what they must be, and damage at any byte."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_server import spec as specs
from lora_server.adapters import find_adapters, open_adapter, validate_adapter
from lora_server.demo import tiny
from lora_server.errors import AdapterFormatError, ConfigError
from tests.support.adapter_files import CONFIG, Q, good, refused, spec_of


def raw(path: Path, header: object, data: bytes = b"", length: int | None = None) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    body = struct.pack("<Q", len(text) if length is None else length) + text + data
    (path / "adapter_model.safetensors").write_bytes(body)


def entry(begin: int, end: int, shape: object = (1,), dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


HEADERS = [
    (b"", 1 << 60, b"", ["header length", "it to fit"]),
    (b"{}", 100_000_001, b"", ["header length", "it to fit"]),
    (b"{}", 50, b"", ["header length of 50 in 10 bytes"]),
    (b"not json", None, b"", ["not JSON"]),
    (b"\xff\xff", None, b"", ["not JSON"]),
    (b"[" * 5000, None, b"", ["not JSON"]),
    (b"[1]", None, b"", ["JSON object"]),
    (b"{}", None, b"", ["no tensors"]),
    ({"__metadata__": {"format": "pt"}}, None, b"", ["no tensors"]),
    (b'{"a": {}, "a": {}}', None, b"", ["a:", "twice"]),
    ({"t": 3}, None, b"", ["t:", "dtype, shape and data_offsets"]),
    ({"t": {"dtype": "F32", "shape": [1]}}, None, bytes(4), ["t:"]),
    ({"t": entry(0, 4, dtype="F64")}, None, bytes(4), ["t:", "F64"]),
    ({"t": entry(0, 4, shape=[-1])}, None, bytes(4), ["t:", "shape [-1]"]),
    ({"t": entry(0, 4, shape=[True])}, None, bytes(4), ["t:", "shape"]),
    ({"t": entry(0, 4, shape="1")}, None, bytes(4), ["t:", "shape '1'"]),
    ({"t": entry(0, 8)}, None, bytes(4), ["t:", "data_offsets [0, 8]", "within the 4 bytes"]),
    ({"t": entry(4, 0)}, None, bytes(4), ["t:", "data_offsets [4, 0]"]),
    ({"t": entry(-4, 0)}, None, bytes(4), ["t:", "data_offsets [-4, 0]"]),
    ({"t": entry(0, 4, shape=[2])}, None, bytes(4), ["t:", "4 bytes", "8 for shape [2]"]),
    ({"t": entry(0, 4, shape=[10**30, 10**30])}, None, bytes(4), ["t:", "a list of sizes"]),
    ({"t": entry(0, 4), "u": entry(0, 4)}, None, bytes(4), ["u:", "overlapping"]),
    ({"t": entry(0, 4), "u": entry(2, 6)}, None, bytes(6), ["u:", "overlapping"]),
    ({"t": entry(0, 4), "u": entry(6, 10)}, None, bytes(10), ["u:", "data at 6", "data at 4"]),
    ({"t": entry(0, 4)}, None, bytes(9), ["5 bytes after the last tensor"]),
]


@pytest.mark.parametrize(("header", "length", "data", "parts"), HEADERS, ids=lambda value: str(value)[:40])
def test_a_header_that_does_not_describe_the_file(header, length, data, parts, tmp_path):
    tiny.write_adapter(tmp_path, good(), CONFIG)
    raw(tmp_path, header, data, length)
    refused(tmp_path, *parts)


@pytest.mark.parametrize("content", [b"", b"1234567", b"12345678"])
def test_a_file_too_short_for_a_header(content, tmp_path):
    tiny.write_adapter(tmp_path, good(), CONFIG)
    (tmp_path / "adapter_model.safetensors").write_bytes(content)
    refused(tmp_path, "adapter_model.safetensors")


@pytest.mark.parametrize("name", ["adapter_model.bin", "pytorch_model.bin", "adapter_model.pt"])
def test_pickle_files_are_refused_unread(name, tmp_path):
    tiny.write_adapter(tmp_path, good(), CONFIG)
    (tmp_path / "adapter_model.safetensors").unlink()
    (tmp_path / name).write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    refused(tmp_path, name, "pickle", "adapter_model.safetensors", "safe_serialization")


def test_missing_files_and_directories(tmp_path):
    refused(tmp_path / "none", "none at this path")
    refused(tmp_path, "adapter_config.json", "no such file")
    (tmp_path / "adapter_config.json").write_text(json.dumps(CONFIG | {"peft_type": "LORA"}))
    refused(tmp_path, "adapter_model.safetensors", "no such file")
    (tmp_path / "adapter_model.safetensors").mkdir()
    refused(tmp_path, "adapter_model.safetensors", "no such file")


def test_a_fifo_is_not_opened(tmp_path):
    tiny.write_adapter(tmp_path, good(), CONFIG)
    (tmp_path / "adapter_model.safetensors").unlink()
    os.mkfifo(tmp_path / "adapter_model.safetensors")
    refused(tmp_path, "adapter_model.safetensors")


def test_a_refusal_is_one_short_line_without_control_characters(tmp_path):
    tiny.write_adapter(tmp_path, good() | {"x\x1b[31m" + "y" * 10_000: torch.ones(1)}, CONFIG)
    message = refused(tmp_path, "no site takes")
    assert len(message) < 1000 and message.isprintable()


def test_a_refused_adapter_leaves_no_open_file(tmp_path):
    tiny.write_adapter(tmp_path, good() | {"x": torch.ones(1)}, CONFIG)
    before = len(list(Path("/proc/self/fd").iterdir()))
    refused(tmp_path, "x")
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_file_cut_short_while_it_is_open(tmp_path):
    tiny.write_adapter(tmp_path, good(), CONFIG)
    with open_adapter(tmp_path, spec_of()) as adapter:
        file = tmp_path / "adapter_model.safetensors"
        os.truncate(file, file.stat().st_size - 900)
        with pytest.raises(AdapterFormatError, match=r"expert 2: adapter_model\.safetensors: got the end of the file"):
            adapter.read(specs.Site(1, "gate_up"), 2)


# ---- several files


def sharded(path: Path, mapping: dict[str, str] | None = None) -> None:
    from safetensors.torch import save_file

    tiny.write_adapter(path, good(), CONFIG)
    (path / "adapter_model.safetensors").unlink()
    keys = sorted(good())
    for name, part in (("one.safetensors", keys[:3]), ("two.safetensors", keys[3:])):
        save_file({key: good()[key] for key in part}, path / name)
    right = dict.fromkeys(keys[:3], "one.safetensors") | dict.fromkeys(keys[3:], "two.safetensors")
    index = {"weight_map": right if mapping is None else right | mapping}
    (path / "adapter_model.safetensors.index.json").write_text(json.dumps(index))


def test_weights_in_several_files(tmp_path):
    sharded(tmp_path)
    adapter, _ = validate_adapter(tmp_path, spec_of())
    with adapter:
        assert adapter.warnings == () and len(adapter.sites()) == 2
        for site in adapter.sites():
            for expert in adapter.experts(site):
                adapter.read(site, expert)


@pytest.mark.parametrize(
    ("mapping", "parts"),
    [
        ({f"{Q}.lora_A.weight": "two.safetensors"}, [f"{Q}.lora_A.weight", "index"]),
        ({"missing": "one.safetensors"}, ["missing"]),
        ({"x": "../one.safetensors"}, ["../one.safetensors"]),
        ({"x": "/etc/passwd"}, ["/etc/passwd"]),
        ({"x": "three.safetensors"}, ["three.safetensors", "no such file"]),
        ({"x": 3}, ["'x'", "got 3"]),
    ],
)
def test_an_index_that_does_not_agree_with_its_files(mapping, parts, tmp_path):
    sharded(tmp_path, mapping)
    refused(tmp_path, *parts)


def test_an_index_beside_a_single_file(tmp_path):
    sharded(tmp_path)
    tiny.write_adapter(tmp_path, good(), CONFIG)
    refused(tmp_path, "index.json", "both")


# ---- directories


def test_find_adapters(tmp_path):
    for name in ("b", "a", "c"):
        tiny.write_adapter(tmp_path / name, good(), CONFIG)
    (tmp_path / "c" / "adapter_config.json").unlink()
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "pickle").mkdir()
    (tmp_path / "pickle" / "adapter_model.bin").write_bytes(b"")
    assert find_adapters(tmp_path) == {name: tmp_path / name for name in ("a", "b", "c", "pickle")}
    assert list(find_adapters(str(tmp_path))) == ["a", "b", "c", "pickle"]


def test_an_adapter_is_not_a_directory_of_adapters(tmp_path):
    tiny.write_adapter(tmp_path / "law", good(), CONFIG)
    (tmp_path / "law" / "checkpoint-7").mkdir()
    with pytest.raises(ConfigError, match=f"law, which is one adapter itself, expected .* give {tmp_path}, or"):
        find_adapters(tmp_path / "law")


@pytest.mark.parametrize("name", ["none", "file"])
def test_find_adapters_without_a_directory(name, tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match=f"{name} cannot be listed"):
        find_adapters(tmp_path / name)


# ---- damage


@pytest.fixture(scope="module")
def damaged(tmp_path_factory):
    path = tmp_path_factory.mktemp("damaged")
    tiny.write_adapter(path, good(), CONFIG)
    return path, (path / "adapter_model.safetensors").read_bytes()


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_file_cut_at_any_byte_is_refused(damaged, data):
    path, content = damaged
    cut = data.draw(st.integers(0, len(content) - 1))
    (path / "adapter_model.safetensors").write_bytes(content[:cut])
    refused(path, "adapter_model.safetensors" if cut < 8 else "")


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_flipped_bytes_give_a_refusal_or_a_readable_adapter(damaged, data):
    path, content = damaged
    header_end = 8 + struct.unpack("<Q", content[:8])[0]
    where = st.one_of(st.integers(0, 7), st.integers(8, header_end - 1), st.integers(header_end, len(content) - 1))
    flipped = bytearray(content)
    flips = data.draw(st.lists(st.tuples(where, st.integers(1, 255)), min_size=1, max_size=4))
    for at, mask in flips:
        flipped[at] ^= mask
    (path / "adapter_model.safetensors").write_bytes(flipped)
    try:
        adapter, _ = validate_adapter(path, spec_of())
    except AdapterFormatError as error:
        assert str(path) in str(error)
        return
    with adapter:
        for site in adapter.sites():
            for expert in adapter.experts(site):
                for _, a, b in adapter.read(site, expert):
                    assert torch.isfinite(a).all() and torch.isfinite(b).all()


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
TREES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
)


@settings(max_examples=200, deadline=None)
@given(
    text=st.binary(max_size=200) | TREES.map(lambda tree: json.dumps(tree).encode()),
    field=st.sampled_from(["", "header", "rank_pattern", *CONFIG]),
)
def test_nothing_but_a_refusal_comes_of_odd_json(damaged, text, field):
    path, content = damaged
    tiny.write_adapter(path, good(), CONFIG)
    if field == "header":
        raw(path, text, content[-500:])
    elif field:
        fields = json.dumps({**CONFIG, "peft_type": "LORA", field: "?"}).encode()
        (path / "adapter_config.json").write_bytes(fields.replace(b'"?"', text))
    else:
        (path / "adapter_config.json").write_bytes(text)
    try:
        open_adapter(path, spec_of()).close()
    except AdapterFormatError as error:
        assert str(path) in str(error)
    finally:
        tiny.write_adapter(path, good(), CONFIG)
