"""`lora-server merge` against PEFT's merge_and_unload, and what it refuses."""

import json
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file

from lora_server.adapters import validate_adapter
from lora_server.demo import tiny
from lora_server.errors import ConfigError
from lora_server.merge import Merge, write
from lora_server.merge.checkpoint import base_weights
from lora_server.merge.rounding import expected_factors
from lora_server.merged import MERGED, find_merged
from lora_server.spec import load

CASES = [
    *((kind, {"targets": "all"}) for kind in tiny.KINDS),
    ("llama", {"targets": "qv", "rslora": True}),
    ("gpt_oss", {"targets": "gate_up", "rank_pattern": {r".*\.1\..*": 2}}),
    *((kind, {"targets": "all", "style": "per_expert"}) for kind in ("mixtral", "qwen3_moe")),
    ("mixtral", {"targets": "shared-outer"}),
]


def merge(base, law, out, report=lambda nbytes: None):
    adapter, version = validate_adapter(law, load(base))
    with adapter:
        return Merge(base, adapter, version, law.name, out).run(report)


def header(path):
    content = path.read_bytes()
    return content[: 8 + struct.unpack("<Q", content[:8])[0]]


def transformers_model(path, dtype=torch.float32):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()


def made(tmp_path, kind, dtype=torch.float32, shards="5GB", **settings):
    model = tiny.make_model(kind, dtype=dtype)
    model.save_pretrained(tmp_path / "base", max_shard_size=shards)
    if settings.get("targets") == "shared-outer":
        tiny.make_shared_outer(model, tmp_path / "law", lora_rank=4, seed=5)
    else:
        tiny.make_adapter(model, tmp_path / "law", lora_rank=4, seed=5, **settings)
    return model, tmp_path / "base", tmp_path / "law", tmp_path / "out"


@pytest.mark.parametrize(("kind", "settings"), CASES, ids=lambda value: str(value).replace(" ", ""))
def test_weights_are_those_of_pefts_merge(kind, settings, tmp_path):
    model, base, law, out = made(tmp_path, kind, **settings)
    record = merge(base, law, out)
    for_peft = "style" not in settings and settings["targets"] != "shared-outer"
    expected = tiny.apply_literal(model, law) if not for_peft else tiny.peft_model(model, law).merge_and_unload()
    merged = transformers_model(out).state_dict()
    changed = 0
    for name, weight in expected.state_dict().items():
        torch.testing.assert_close(merged[name], weight, rtol=0, atol=1e-6, msg=name)
        changed += not torch.equal(model.state_dict()[name], weight)
    assert changed >= 4
    assert (record.name, record.dtype) == ("law", "F32")
    assert record == find_merged(out)
    assert record.base_fingerprint == load(out).fingerprint()


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_bfloat16_costs_other_rows_one_rounding(kind, tmp_path):
    _, base, law, out = made(tmp_path, kind, torch.bfloat16, targets="all")
    record = merge(base, law, out)
    ratio = {name: one["merged"] / one["unmerged"] for name, one in record.errors.items()}
    assert 1.0 < ratio["others"] <= 1.4 and 1.0 < ratio["base_model"] <= 2.0 and ratio["merged"] <= 1.1
    assert ratio == pytest.approx(expected_factors(record.delta_ratio), rel=0.05)
    assert header(out / "model.safetensors") == header(base / "model.safetensors")


def test_the_fingerprint_of_base_weights_is_that_of_their_content(tmp_path):
    model, base, law, out = made(tmp_path, "llama", targets="qv")
    model.save_pretrained(tmp_path / "split", max_shard_size="200KB")
    assert merge(base, law, out).base_weights == base_weights(base) == base_weights(tmp_path / "split") != ""
    tiny.save_model(tiny.make_model("llama", seed=1), tmp_path / "other")
    assert base_weights(tmp_path / "other") not in ("", base_weights(base))
    (tmp_path / "split/model.safetensors.index.json").unlink()
    assert base_weights(tmp_path / "split") == base_weights("mixtral-8x7b") == base_weights(out) == ""


def test_an_interrupted_merge_continues_and_leaves_no_output_before(tmp_path):
    _, base, law, out = made(tmp_path, "llama", shards="200KB", targets="all")
    (base / "tokenizer.json").write_text("{}")
    (base / "pytorch_model.bin").write_bytes(b"pickle")
    files = sorted(path.name for path in base.glob("*.safetensors"))
    assert len(files) > 2
    written = 0

    def power_cut(nbytes):
        nonlocal written
        written += nbytes
        if written > (base / files[0]).stat().st_size + 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        merge(base, law, out, power_cut)
    assert not out.exists()
    (partial,) = tmp_path.glob(".out.partial")
    before = (partial / files[0]).stat().st_mtime_ns
    record = merge(base, law, out)
    assert (out / files[0]).stat().st_mtime_ns == before
    assert not list(tmp_path.glob(".out*"))
    assert sorted(path.name for path in out.iterdir()) == sorted(
        [*files, "config.json", "generation_config.json", "model.safetensors.index.json", "tokenizer.json", MERGED]
    )
    merge(base, law, tmp_path / "once")
    for name in files:
        assert (out / name).read_bytes() == (tmp_path / "once" / name).read_bytes()
    assert record.errors == find_merged(tmp_path / "once").errors


def test_memory_holds_one_matrix_of_one_expert(tmp_path, monkeypatch):
    """GPT-OSS has all experts in one tensor."""
    monkeypatch.setattr(write, "CHUNK_BYTES", 1024)
    model, base, law, out = made(tmp_path, "gpt_oss", targets="all")
    pieces = []
    merge(base, law, out, pieces.append)
    experts = model.model.layers[0].mlp.experts.gate_up_proj
    assert max(pieces) == experts[0].nbytes < experts.nbytes
    assert sum(pieces) == (base / "model.safetensors").stat().st_size


def test_what_cannot_be_merged_is_refused_by_name(tmp_path):
    model, base, law, out = made(tmp_path, "llama", targets="all")
    merge(base, law, out)
    with pytest.raises(ConfigError, match="a path that exists"):
        merge(base, law, out)
    with pytest.raises(ConfigError, match="a merged model"):
        merge(out, law, tmp_path / "twice")
    weights, config = base / "model.safetensors", json.loads((base / "config.json").read_text())
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1])
    with pytest.raises(ConfigError, match="truncated or damaged"):
        merge(base, law, tmp_path / "new")
    weights.write_bytes(whole)
    save_file({name: one.to(torch.float8_e4m3fn) for name, one in load_file(weights).items()}, weights)
    with pytest.raises(ConfigError, match="of F8_E4M3, expected"):
        merge(base, law, tmp_path / "new")
    save_file({"model.norm.weight": torch.ones(64)}, weights)
    with pytest.raises(ConfigError, match="no tensor for gate of Site"):
        merge(base, law, tmp_path / "new")
    (base / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(ConfigError, match=r"quantised base model \(fp8\)"):
        merge(base, law, tmp_path / "new")
    (base / "config.json").write_text(json.dumps(config))
    tiny.make_adapter(model, tmp_path / "late", lora_rank=2, seed=1, targets="qv", invocation=[5, 6])
    weights.write_bytes(whole)
    with pytest.raises(ConfigError, match="an activated LoRA"):
        merge(base, tmp_path / "late", tmp_path / "new")
    weights.unlink()
    with pytest.raises(ConfigError, match=r"no model\.safetensors"):
        merge(base, law, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_merged_model_that_was_copied_in_part_is_refused(tmp_path):
    _, base, law, out = made(tmp_path, "llama", targets="qv")
    merge(base, law, out)
    assert find_merged(base) is None
    weights, record = out / "model.safetensors", out / MERGED
    weights.write_bytes(weights.read_bytes()[:-8])
    with pytest.raises(ConfigError, match=r"model\.safetensors: got \d+ bytes, expected"):
        find_merged(out)
    weights.unlink()
    with pytest.raises(ConfigError, match="no such file"):
        find_merged(out)
    record.write_text(json.dumps(json.loads(record.read_text()) | {"format": 2}))
    with pytest.raises(ConfigError, match="got format 2"):
        find_merged(out)
    record.write_text("{")
    with pytest.raises(ConfigError, match="cannot be read"):
        find_merged(out)
