"""`lora-server merge` against PEFT's merge_and_unload, what it refuses, what it prints, and of what it warns."""

import json
import re
import struct

import pytest
import structlog
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from lora_server.adapters import validate_adapter
from lora_server.cli import app
from lora_server.demo import tiny
from lora_server.errors import ConfigError
from lora_server.merge import Merge, write
from lora_server.merge.checkpoint import base_weights
from lora_server.merge.rounding import expected_factors
from lora_server.merged import MERGED, find_merged
from lora_server.spec import load
from tests.support.screens import on_terminal

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
    merged = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).state_dict()
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
    others = {"config.json", "generation_config.json", "model.safetensors.index.json", "tokenizer.json", MERGED}
    assert {path.name for path in out.iterdir()} == {*files, *others}
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

    def refuses(says, base=base, law=law, out=tmp_path / "new"):
        with pytest.raises(ConfigError, match=says):
            merge(base, law, out)

    refuses("a path that exists", out=out)
    refuses("a merged model", base=out)
    weights, config = base / "model.safetensors", json.loads((base / "config.json").read_text())
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1])
    refuses("truncated or damaged")
    weights.write_bytes(whole)
    save_file({name: one.to(torch.float8_e4m3fn) for name, one in load_file(weights).items()}, weights)
    refuses("of F8_E4M3, expected")
    save_file({"model.norm.weight": torch.ones(64)}, weights)
    refuses("no tensor for gate of Site")
    (base / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    refuses(r"quantised base model \(fp8\)")
    (base / "config.json").write_text(json.dumps(config))
    tiny.make_adapter(model, tmp_path / "late", lora_rank=2, seed=1, targets="qv", invocation=[5, 6])
    weights.write_bytes(whole)
    refuses("an activated LoRA", law=tmp_path / "late")
    weights.unlink()
    refuses(r"no model\.safetensors")
    assert not (tmp_path / "new").exists()


def test_a_merged_model_that_was_copied_in_part_is_refused(tmp_path):
    _, base, law, out = made(tmp_path, "llama", targets="qv")
    merge(base, law, out)
    assert find_merged(base) is None
    weights, record = out / "model.safetensors", out / MERGED
    short, later = weights.read_bytes()[:-8], json.dumps(json.loads(record.read_text()) | {"format": 2})
    for damage, says in (
        (lambda: weights.write_bytes(short), r"model\.safetensors: got \d+ bytes, expected"),
        (weights.unlink, "no such file"),
        (lambda: record.write_text(later), "got format 2"),
        (lambda: record.write_text("{"), "cannot be read"),
    ):
        damage()
        with pytest.raises(ConfigError, match=says):
            find_merged(out)


# -- the command


@pytest.fixture(autouse=True)
def _logs():
    """The command's logs go to the test's stderr, which ends with it."""
    yield
    structlog.reset_defaults()


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A bfloat16 base model, and adapters whose deltas are about 0.1 and 1.5 of its weights."""
    root = tmp_path_factory.mktemp("merge")
    model = tiny.make_model("llama", dtype=torch.bfloat16)
    tiny.save_model(model, root / "base")
    for name, alpha in (("small", 1.6), ("large", 24.0)):
        tiny.make_adapter(model, root / name, lora_rank=4, seed=5, targets="all", alpha=alpha)
    return root


def flags(files, out, adapter="small", *more):
    return ["merge", "--base-model", str(files / "base"), "--adapter", str(files / adapter), "--out", str(out), *more]


def printed(*asked):
    found = CliRunner().invoke(app, flags(*asked))
    assert found.exit_code == 0, found.output
    return " ".join(found.stdout.split()), " ".join(found.stderr.split())


def test_errors_are_printed_beside_what_the_law_expects(files, tmp_path):
    shown, warnings = printed(files, tmp_path / "out")
    record = find_merged(tmp_path / "out")
    assert f"its delta is {record.delta_ratio:.2g} of the weights" in shown and not warnings
    assert re.search(r"rows of error, not merged error, merged ratio expected small \S+ \S+ \S+x 1\.00x", shown)
    ratios = r"the base model 1\.\de-03 \S+ 1\.7\dx 1\.74x another adapter \S+ \S+ 1\.2\dx 1\.23x"
    assert re.search(ratios, shown), shown
    found = CliRunner().invoke(app, flags(files, tmp_path / "again", "small", "--json"))
    assert json.loads(found.stdout)["delta_ratio"] == record.delta_ratio


def test_a_delta_that_is_large_beside_the_weights_gets_a_warning_with_figures_and_a_cure(files, tmp_path):
    _, warnings = printed(files, tmp_path / "out", "large")
    for rows, most, limit in (("the base model", "2", "0.57"), ("another adapter", "1.4", "0.92")):
        assert re.search(
            rf"warning: rows of {rows} have \d\.\d\d times the rounding error of an engine without a merge "
            rf"\(\S+ and \S+\), expected at most {most} times: the delta is 1\.\d\d of the weights, and up to {limit} "
            "keeps it; leave this adapter to the server, or merge it into a float32 copy of the base model",
            warnings,
        ), warnings


@pytest.mark.parametrize(("share", "warns"), [("0.24", True), ("0.5", False), ("0.8", False)])
def test_a_share_below_break_even_gets_a_warning(files, tmp_path, share, warns):
    _, warnings = printed(files, tmp_path / "out", "small", "--hot-share", share)
    expected = "warning: --hot-share 0.24: the server computes 1.52 entries per adapter row, and 1.00 without a merge"
    assert (expected in warnings) == warns == bool(warnings)


def test_a_terminal_shows_progress_and_a_pipe_does_not(files, tmp_path):
    _, seen = on_terminal("lora_server", flags(files, tmp_path / "out"), "stderr")
    assert "merging (MiB)" in seen
    _, warnings = printed(files, tmp_path / "again")
    assert warnings == ""
