"""Files, headers and directories that are not what they must be."""

import json
import os
from pathlib import Path

import pytest
import torch

from lora_server import spec as specs
from lora_server.adapters import find_adapters, open_adapter, validate_adapter
from lora_server.demo import tiny
from lora_server.errors import AdapterFormatError, ConfigError
from tests.support.adapter_files import CONFIG, Q, good, read_all, refused, spec_of, weights_of


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
    (tmp_path / "adapter_model.safetensors").write_bytes(weights_of(header, data, length))
    refused(tmp_path, *parts)


@pytest.mark.parametrize("name", ["adapter_model.bin", "pytorch_model.bin", "adapter_model.pt"])
def test_pickle_files_are_refused_unread(name, tmp_path):
    tiny.write_adapter(tmp_path, good(), CONFIG)
    (tmp_path / "adapter_model.safetensors").rename(tmp_path / name)
    (tmp_path / name).write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    refused(tmp_path, name, "pickle", "adapter_model.safetensors", "safe_serialization")


def test_files_that_are_missing_or_no_files(tmp_path):
    refused(tmp_path / "none", "none at this path")
    refused(tmp_path, "adapter_config.json", "no such file")
    (tmp_path / "adapter_config.json").write_text(json.dumps(CONFIG | {"peft_type": "LORA"}))
    weights = tmp_path / "adapter_model.safetensors"
    refused(tmp_path, weights.name, "no such file")
    weights.mkdir()
    refused(tmp_path, weights.name, "no such file")
    weights.rmdir()
    os.mkfifo(weights)
    refused(tmp_path, weights.name)  # and does not wait for a writer


def test_a_refusal_is_one_short_line_and_leaves_no_open_file(tmp_path):
    tiny.write_adapter(tmp_path, good() | {"x\x1b[31m" + "y" * 10_000: torch.ones(1)}, CONFIG)
    before = len(list(Path("/proc/self/fd").iterdir()))
    message = refused(tmp_path, "no site takes")
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    assert len(message) < 1000 and message.isprintable()


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
        assert adapter.warnings == () and len(adapter.sites()) == 2 and len(read_all(adapter)) == 4


@pytest.mark.parametrize(("mapping", "parts"), [
    ({f"{Q}.lora_A.weight": "two.safetensors"}, [f"{Q}.lora_A.weight", "index"]),
    ({"missing": "one.safetensors"}, ["missing"]),
    ({"x": "../one.safetensors"}, ["../one.safetensors"]),
    ({"x": "/etc/passwd"}, ["/etc/passwd"]),
    ({"x": "three.safetensors"}, ["three.safetensors", "no such file"]),
    ({"x": 3}, ["'x'", "got 3"]),
])  # fmt: skip
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


def test_what_is_no_directory_of_adapters(tmp_path):
    tiny.write_adapter(tmp_path / "law", good(), CONFIG)
    (tmp_path / "law" / "checkpoint-7").mkdir()
    with pytest.raises(ConfigError, match=f"law, which is one adapter itself, expected .* give {tmp_path}, or"):
        find_adapters(tmp_path / "law")
    (tmp_path / "file").write_text("x")
    for name in ("none", "file"):
        with pytest.raises(ConfigError, match=f"{name} cannot be listed"):
            find_adapters(tmp_path / name)
