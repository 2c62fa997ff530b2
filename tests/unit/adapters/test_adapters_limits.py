"""Valid files that are far larger, or far slower, than any adapter of the model: refused soon, and in little memory."""

import json
import re
import time
import tracemalloc

import pytest
import torch

from lora_server import spec as specs
from lora_server.adapters import Limits, open_adapter
from lora_server.adapters.limits import BYTES_PER_VALUE, MAX_FILES
from lora_server.adapters.patterns import Patterns
from lora_server.demo import tiny
from tests.support.adapter_files import CONFIG, LAYERS, good, refused, spec_of

LIMITS = Limits.of(spec_of())


def write(directory, **config):
    tiny.write_adapter(directory, good(), CONFIG | config)


def refused_in_little(directory, *parts):
    tracemalloc.start()
    try:
        refused(directory, *parts)
        assert tracemalloc.get_traced_memory()[1] < 24 << 20
    finally:
        tracemalloc.stop()


def test_a_config_that_is_too_large_is_not_read(tmp_path):
    write(tmp_path)
    file = tmp_path / "adapter_config.json"
    text = json.dumps(json.loads(file.read_text()) | {"note": "x" * (63 << 20)})
    file.write_text(text)
    refused_in_little(tmp_path, "adapter_config.json", f"{len(text)} bytes", f"at most {LIMITS.config_bytes}")


def test_headers_that_are_too_large_are_not_read(tmp_path):
    write(tmp_path)
    one = json.dumps({"dtype": "F32", "shape": [1], "data_offsets": [0, 4]})
    header = ("{" + ", ".join(f'"{LAYERS}.0.x{n}": {one}' for n in range(200_000)) + "}").encode()
    file = tmp_path / "adapter_model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    refused_in_little(tmp_path, "header", f"{len(header)} bytes", f"at most {LIMITS.header_bytes}")


@pytest.mark.parametrize("dense", ["[],", "1,", "[[[[]]]],", '{"":{}},'])
def test_a_text_of_very_many_values_is_not_parsed(tmp_path, dense):
    """As long as it may be, but parsing it would hold everybody up."""
    values = "[" + (dense * (LIMITS.config_bytes // len(dense) - 400)).removesuffix(",") + "]"
    write(tmp_path)
    header = f'{{"__metadata__": {values}}}'.encode()
    (tmp_path / "adapter_model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    refused(tmp_path, "header", "values", f"at most {LIMITS.header_bytes // BYTES_PER_VALUE}")
    write(tmp_path)
    file = tmp_path / "adapter_config.json"
    file.write_text(file.read_text().replace("{", f'{{"note": {values},', 1))
    refused(tmp_path, "adapter_config.json", "values", f"at most {LIMITS.config_bytes // BYTES_PER_VALUE}")


def test_headers_count_together(tmp_path):
    """Of several files, each of which may be."""
    write(tmp_path)
    (tmp_path / "adapter_model.safetensors").unlink()
    names = {}
    for number in range(4):
        header = json.dumps({"__metadata__": {"x": "y" * (LIMITS.header_bytes // 3)}, **tensor(f"t{number}")}).encode()
        file = f"part-{number}.safetensors"
        (tmp_path / file).write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
        names[f"t{number}"] = file
    index = tmp_path / "adapter_model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": names}))
    refused(tmp_path, "part-2.safetensors: header", f"at most {LIMITS.header_bytes}")
    index.write_text(json.dumps({"weight_map": {f"t{n}": f"{n}.safetensors" for n in range(MAX_FILES + 1)}}))
    refused(tmp_path, f"{MAX_FILES + 1} files", f"at most {MAX_FILES}")


def tensor(name):
    return {name: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}


def test_more_tensors_than_the_model_has_places(tmp_path):
    tensors = {f"t{n}": torch.ones(1) for n in range(LIMITS.tensors + 1)}
    tiny.write_adapter(tmp_path, tensors, CONFIG)
    refused(tmp_path, "more tensors", f"at most {LIMITS.tensors}")


@pytest.mark.parametrize("name", ["mixtral-8x7b", "qwen3-30b-a3b", "gpt-oss-20b"])
def test_what_names_every_matrix_of_a_model_is_within_the_limits(name):
    """As PEFT writes it, indented, with a rank and an alpha for each."""
    spec = specs.load(name)
    modules = [
        f"model.layers.{layer}.mlp.experts.{expert}.gate_proj"
        for layer in range(spec.layers)
        for expert in range(spec.experts)
        for _ in range(3)
    ] + [f"model.layers.{layer}.self_attn.{one}_proj" for layer in range(spec.layers) for one in "qkvo"]
    longest = "base_model.model.model.layers.47.block_sparse_moe.experts.127.gate_proj.lora_A.default.weight"
    described = json.dumps({longest: {"dtype": "BF16", "shape": [1024, 16384], "data_offsets": [2**36, 2**36 + 2**25]}})
    one = 4 * " " + json.dumps({f"^{re.escape(modules[0])}$": 1024}) + ",\n"
    limits = Limits.of(spec)
    assert limits.tensors >= 2 * len(modules)
    assert 3 * len(one) * len(modules) < limits.config_bytes
    assert len(described) * 2 * len(modules) < limits.header_bytes
    values = sum(map(described.count, ",[{"))
    assert values * 2 * len(modules) < limits.header_bytes // BYTES_PER_VALUE


@pytest.mark.parametrize(
    "pattern", ["(.|.)" * 60 + "x", "(.*)*x", "(.+)+x", ".?" * 200 + "x", ".*" * 60 + "x", "(a?){900}x", "((.*)*)*x"]
)
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
