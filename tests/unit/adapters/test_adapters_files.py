"""Files, headers and directories that are not what they must be, or are too large: refused soon, in little memory."""

import json
import os
import re
import time
import tracemalloc
from functools import partial
from pathlib import Path

import pytest
import torch

from lora_server import spec as specs
from lora_server.adapters import AdapterLimits, find_adapters, open_adapter, validate_adapter
from lora_server.adapters.limits import BYTES_PER_VALUE, MAX_FILES
from lora_server.adapters.patterns import Patterns
from lora_server.demo import tiny
from lora_server.errors import AdapterFormatError, ConfigError
from tests.support.adapter_files import CONFIG, LAYERS, Q, good, read_all, refused, spec_of, weights_of


def entry(begin, end, shape=(1,), dtype="F32"):
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
        site = specs.Site(1, "gate_up")
        sizes = [(one.lora_rank, one.out_end - one.out_begin) for one in adapter.parts(site, 2)]
        places = [(torch.empty(rank, spec_of().in_width(site)), torch.empty(out, rank)) for rank, out in sizes]
        for read in (adapter.read, partial(adapter.read_into, places=places)):
            cut = r"expert 2: adapter_model\.safetensors: got the end of the file"
            with pytest.raises(AdapterFormatError, match=cut):
                read(site, 2)


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


def test_weights_in_several_files_or_in_a_single_one(tmp_path):
    sharded(tmp_path)
    adapter, _ = validate_adapter(tmp_path, spec_of())
    with adapter:
        assert adapter.warnings == () and len(adapter.sites()) == 2 and len(read_all(adapter)) == 4
    tiny.write_adapter(tmp_path, good(), CONFIG)
    refused(tmp_path, "index.json", "both")


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


# ---- directories


NO_TEXT = os.fsdecode(b"caf\xe9")


def test_find_adapters(tmp_path):
    for name in ("b", "a", "c"):
        tiny.write_adapter(tmp_path / name, good(), CONFIG)
    (tmp_path / "c" / "adapter_config.json").unlink()
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "pickle").mkdir()
    (tmp_path / "pickle" / "adapter_model.bin").write_bytes(b"")
    (tmp_path / "a").with_name(NO_TEXT).symlink_to(tmp_path / "a")
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
    (tmp_path / NO_TEXT).mkdir()
    with pytest.raises(ConfigError, match=r"caf\\xe9, expected a path of UTF-8"):
        find_adapters(tmp_path / NO_TEXT)


LIMITS = AdapterLimits.of(spec_of())


def write(directory, **config):
    tiny.write_adapter(directory, good(), CONFIG | config)


def test_a_config_or_a_header_that_is_too_large_is_not_read(tmp_path):
    config, weights = tmp_path / "adapter_config.json", tmp_path / "adapter_model.safetensors"
    write(tmp_path)
    long = json.dumps(json.loads(config.read_text()) | {"note": "x" * (63 << 20)})
    one = json.dumps({"dtype": "F32", "shape": [1], "data_offsets": [0, 4]})
    header = ("{" + ", ".join(f'"{LAYERS}.0.x{n}": {one}' for n in range(200_000)) + "}").encode()
    file = weights_of(header, bytes(4))
    for damaged, content, parts in (
        (weights, file, ["header", f"{len(header)} bytes", f"at most {LIMITS.header_bytes}"]),
        (config, long.encode(), ["adapter_config.json", f"{len(long)} bytes", f"at most {LIMITS.config_bytes}"]),
    ):
        write(tmp_path)
        damaged.write_bytes(content)
        tracemalloc.start()
        try:
            refused(tmp_path, *parts)
            assert tracemalloc.get_traced_memory()[1] < 24 << 20
        finally:
            tracemalloc.stop()


@pytest.mark.parametrize("dense", ["[],", "1,", "[[[[]]]],", '{"":{}},'])
def test_a_text_of_very_many_values_is_not_parsed(tmp_path, dense):
    """As long as it may be, but parsing it would hold everybody up."""
    values = "[" + (dense * (LIMITS.config_bytes // len(dense) - 400)).removesuffix(",") + "]"
    write(tmp_path)
    (tmp_path / "adapter_model.safetensors").write_bytes(weights_of(f'{{"__metadata__": {values}}}'.encode()))
    refused(tmp_path, "header", "values", f"at most {LIMITS.header_bytes // BYTES_PER_VALUE}")
    write(tmp_path)
    file = tmp_path / "adapter_config.json"
    file.write_text(file.read_text().replace("{", f'{{"note": {values},', 1))
    refused(tmp_path, "adapter_config.json", "values", f"at most {LIMITS.config_bytes // BYTES_PER_VALUE}")


def test_headers_count_together(tmp_path):
    """Of several files, each of which may be."""
    write(tmp_path)
    (tmp_path / "adapter_model.safetensors").unlink()
    names = {f"t{number}": f"part-{number}.safetensors" for number in range(4)}
    for name, file in names.items():
        header = {"__metadata__": {"x": "y" * (LIMITS.header_bytes // 3)}, name: entry(0, 4)}
        (tmp_path / file).write_bytes(weights_of(header, bytes(4)))
    index = tmp_path / "adapter_model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": names}))
    refused(tmp_path, "part-2.safetensors: header", f"at most {LIMITS.header_bytes}")
    index.write_text(json.dumps({"weight_map": {f"t{n}": f"{n}.safetensors" for n in range(MAX_FILES + 1)}}))
    refused(tmp_path, f"{MAX_FILES + 1} files", f"at most {MAX_FILES}")


def test_more_tensors_than_the_model_has_places(tmp_path):
    tensors = {f"t{n}": torch.ones(1) for n in range(LIMITS.tensors + 1)}
    tiny.write_adapter(tmp_path, tensors, CONFIG)
    refused(tmp_path, "more tensors", f"at most {LIMITS.tensors}")


@pytest.mark.parametrize("name", ["mixtral-8x7b", "qwen3-30b-a3b", "gpt-oss-20b"])
def test_what_names_every_matrix_of_a_model_is_within_the_limits(name):
    """As PEFT writes it, indented, with a rank and an alpha for each."""
    spec = specs.load(name)
    matrices = spec.layers * (3 * spec.experts + 4)
    expert = f"model.layers.{spec.layers - 1}.mlp.experts.{spec.experts - 1}.gate_proj"
    longest = "base_model.model.model.layers.47.block_sparse_moe.experts.127.gate_proj.lora_A.default.weight"
    described = json.dumps({longest: {"dtype": "BF16", "shape": [1024, 16384], "data_offsets": [2**36, 2**36 + 2**25]}})
    pattern = 4 * " " + json.dumps({f"^{re.escape(expert)}$": 1024}) + ",\n"
    limits = AdapterLimits.of(spec)
    assert limits.tensors >= 2 * matrices
    assert 3 * len(pattern) * matrices < limits.config_bytes
    assert len(described) * 2 * matrices < limits.header_bytes
    values = sum(map(described.count, ",[{"))
    assert values * 2 * matrices < limits.header_bytes // BYTES_PER_VALUE


SLOW = ["(.|.)" * 60 + "x", "(.*)*x", "(.+)+x", ".?" * 200 + "x", ".*" * 60 + "x", "(a?){900}x", "((.*)*)*x"]


@pytest.mark.parametrize("pattern", SLOW)
def test_a_pattern_is_matched_in_no_time(pattern):
    """Python's own re does not come back from most of these."""
    patterns = Patterns("rank_pattern", {pattern: 1})
    modules = [f"model.layers.{n}.block_sparse_moe.experts.{n}.gate_up_proj" for n in range(1000)]
    began = time.process_time()
    assert not any(map(patterns.first, modules))
    assert time.process_time() - began < 5


def test_warnings_are_few(tmp_path):
    """30,000 of them made a list of adapters too large to be sent."""
    unknown = {f"field_{n}": n for n in range(2000)}
    write(tmp_path, base_model_name_or_path="x" * 10_000, **unknown)
    for number in range(100):
        (tmp_path / f"other-{number}.safetensors").touch()
    with open_adapter(tmp_path, spec_of()) as adapter:
        warnings = adapter.warnings
    assert "1,992 more of this kind" in warnings and "92 more of this kind" in warnings
    assert len(warnings) == 19 and sum(map(len, warnings)) < 8000
    write(tmp_path, layers_to_transform=list(range(10, 3000)))
    assert len(refused(tmp_path, "layers_to_transform")) < 2000
