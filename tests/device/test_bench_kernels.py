"""bench.kernels: everything of it that runs without a GPU, and its steps through the emulated kernels."""

from __future__ import annotations

import functools
import re
import sys
import zipfile
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from bench import fetch_peers, kernels_cpu
from bench.kernels import correctness, draws, ours, peer_process, roofline
from bench.kernels.models import MODELS, NUM_ADAPTERS, Model
from bench.kernels.peers import vllm
from kernels_cuda import routing, sizes
from kernels_cuda.heuristics import Variant
from tests.support.gpu import emulated
from tests.support.sources import ROOT

SMALL = Variant(bulk_copy=True, warps=2)
TINY = Model("tiny", 256, 64, 4, 2, 16)

# reference figures at 4.3 TB/s: D, rows per segment, MB of gate_up and down, us of gate_up and of down
TABLE = {
    ("mixtral-8x7b", 64): (89, 1.44, 420, 210, 99, 50),
    ("mixtral-8x7b", 1024): (671, 3.05, 3165, 1582, 765, 386),
    ("qwen3-30b-a3b", 256): (1421, 1.44, 512, 256, 121, 62),
    ("gpt-oss-20b", 256): (607, 1.69, 895, 447, 211, 107),
    ("dbrx", 64): (178, 1.44, 769, 385, 182, 91),
}


def test_the_roofline_gives_the_reference_figures_and_our_layout_reads_no_more():
    rows = {(r["model"], r["tokens"], r["site"]): r for r in roofline.table(list(MODELS.values()), [64, 256, 1024])}
    for (name, tokens), (pairs, per_segment, gate_up_mb, down_mb, gate_up_us, down_us) in TABLE.items():
        gate_up, down = rows[name, tokens, "gate_up"], rows[name, tokens, "down"]
        keys = ("distinct_pairs", "weights_mb", "floor_us")
        assert [gate_up[key] for key in keys] == pytest.approx([pairs, gate_up_mb, gate_up_us], abs=0.6)
        assert gate_up["rows_per_segment"] == pytest.approx(per_segment, abs=0.006)
        assert down["weights_mb"] == pytest.approx(down_mb, abs=0.6)
        # those figures count a result per (token, expert) of down; our floor only the sum per token
        model = MODELS[name]
        more_us = tokens * (model.top_k - 1) * model.hidden * 2 / roofline.GBPS / 1e3
        assert down["floor_us"] + more_us == pytest.approx(down_us, abs=1)

    # ranks and widths of these models fill whole fragments, so our layout adds no byte
    for model in MODELS.values():
        for site in model.sites:
            assert site.shape.read_bytes == site.a_bytes + site.b_bytes
            assert site.shape.num_tiles * sizes.TILE_BYTES < 1.07 * site.shape.read_bytes


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_draws_match_the_formula_and_the_router(model):
    counts = [draws.distinct_pairs(draws.draw(model, 256, seed), model.num_experts) for seed in range(40)]
    expected = roofline.expected_pairs(model, 256)
    deviation = np.std(counts, ddof=1) / np.sqrt(len(counts))
    assert abs(np.mean(counts) - expected) < 4 * deviation + 1
    step = draws.draw(model, 256, 3)
    assert all(len(set(experts)) == model.top_k for experts in step.experts_Tk)
    assert step.adapters_T.min() >= 0 and step.adapters_T.max() < NUM_ADAPTERS
    np.testing.assert_allclose(step.weights_Tk.sum(axis=1), 1, rtol=1e-6)
    again = draws.draw(model, 256, 3)
    assert all(np.array_equal(a, b) for a, b in zip(step, again, strict=True)), "a seed is a draw"
    assert not np.array_equal(step.experts_Tk, draws.draw(model, 256, 4).experts_Tk)

    for step in draws.draws(model, 64):  # distinct pairs are the segments
        directory = np.tile(np.int32([0, 0, 1]), (NUM_ADAPTERS, 1))
        segments = routing.reference(*step, directory, model.num_experts).segments
        assert len(segments) == draws.distinct_pairs(step, model.num_experts)


def launch(step, out, workspace, kernel="lora_step", variant=SMALL):
    emulated.launch(step, out, workspace, variant, kernel=kernel)


def route(*arguments):
    emulated.run("route", routing.arguments(*arguments), SMALL, source="route.cu")


@pytest.mark.emulator
@pytest.mark.parametrize("site", TINY.sites, ids=lambda site: site.name)
def test_a_step_of_the_bench_is_right(site):
    """Adapters as the bench packs them, routed and run by the kernels, checked by the bench's own check."""
    generator = torch.Generator().manual_seed(1)
    adapters = ours.Adapters(TINY, site, generator, num_adapters=5)
    rng = np.random.default_rng(2)
    drawn = draws.draw(TINY, 12, 0)._replace(adapters_T=rng.integers(0, 5, 12).astype(np.int32))
    rows = torch.randn(24 if site.combine else 12, site.in_width, generator=generator).to(ours.DTYPE)
    draw = ours.device_draw(TINY, adapters, drawn, rows)
    draw.out.fill_(float("nan"))
    ours.route(draw, SimpleNamespace(launch=route))
    ours.launch(draw, SimpleNamespace(launch=launch), ours.workspace_for(TINY, site, 12, torch.device("cpu")))
    assert ours.sampled_error(draw, adapters, 100, 0) < 3e-3
    draw.out[5] *= 1.1
    assert ours.sampled_error(draw, adapters, 100, 0) > 0.09, "the check must see one wrong row"
    draw.out[5] = float("nan")
    assert ours.sampled_error(draw, adapters, 100, 0) == float("inf")


@pytest.mark.emulator
@pytest.mark.parametrize("popularity", correctness.POPULARITY)
@pytest.mark.parametrize("combine", [False, True])
def test_the_correctness_mode_passes_and_can_fail(popularity, combine):
    case = correctness.Case(300, 70, 12, popularity, combine, torch.bfloat16, 5)
    slow = functools.partial(launch, variant=Variant(bulk_copy=False, warps=1))
    result = correctness.check(case, torch.device("cpu"), [launch, slow])
    assert result["same_bits"] and result["error"] > 0 and correctness.right(result)

    def wrong(step, out, workspace, kernel):
        launch(step, out, workspace, kernel)
        if kernel != "shrink":
            out[0, :3] += 1 + torch.rand(1, dtype=torch.float32).to(out.dtype)

    assert correctness.check(case, torch.device("cpu"), [wrong])["error"] > 1e-3
    assert not correctness.check(case, torch.device("cpu"), [launch, wrong])["same_bits"]
    empty = correctness.Case(40, 24, 0, popularity, combine, torch.float16, 5)
    result = correctness.check(empty, torch.device("cpu"), [launch])
    assert result == {"case": str(empty), "error": 0.0, "rounding": 0.0, "same_bits": True}


@pytest.mark.parametrize("block", [16, 64])
def test_vllms_sorted_layout_holds_every_pair_once(block):
    step = draws.draw(TINY, 50, 0)
    sorted_ids, expert_ids, padded = vllm.align(step, TINY.num_experts, NUM_ADAPTERS, block)
    pairs = step.experts_Tk.size
    assert np.array_equal(np.sort(sorted_ids[sorted_ids < pairs]), np.arange(pairs))
    for adapter in np.flatnonzero(padded):
        assert padded[adapter] % block == 0
        for at in range(padded[adapter]):
            pair = sorted_ids[adapter, at]
            if pair < pairs:
                assert step.adapters_T[pair // TINY.top_k] == adapter
                assert step.experts_Tk.reshape(-1)[pair] == expert_ids[adapter, at // block]


STAND_IN = '#!/bin/sh\nfor last; do :; done\necho "{\\"peer\\": \\"${last%%,*}\\", \\"begin\\": true}"\n'


@pytest.mark.parametrize(
    ("does", "reason"),
    [
        ("", "nowhere is missing; run"),  # Python itself: without their files every peer is an error line
        ("exit 3", "its process ended with 3"),
        ("exec sleep 60", "its process took more than 0.5 s"),
    ],
)
def test_a_peer_whose_process_ends_badly_or_never_costs_that_peer_alone(monkeypatch, tmp_path, does, reason):
    """The stand-in for Python begins the first peer that it is asked for."""
    if does:
        monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
        (tmp_path / "python").write_text(STAND_IN + does)
        (tmp_path / "python").chmod(0o755)
    limit = {"seconds": 0.5} if "sleep" in does else {}
    lines = peer_process.collect("dbrx", "down", [64], ["vllm", "sglang", "punica"], tmp_path / "nowhere", **limit)
    assert [line["peer"] for line in lines] == ["vllm", "sglang", "punica"]
    assert all(reason in line["error"] for line in lines)


def test_only_wanted_files_leave_a_wheel(tmp_path):
    wheel = tmp_path / "x-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in ("keep/a.py", "keep/deep/b.py", "keep/c.so", "other/d.py", "keep/../../e.py"):
            archive.writestr(name, name)
    found = fetch_peers.extract(wheel, ("keep/",), tmp_path / "out")
    assert sorted(found) == ["keep/a.py", "keep/deep/b.py"]
    written = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.py"))
    assert written == ["out/keep/a.py", "out/keep/deep/b.py"]
    with pytest.raises(ValueError, match="no Python file in missing/; its layout has changed"):
        fetch_peers.extract(wheel, ("missing/",), tmp_path / "out")


@pytest.mark.parametrize("dtype", kernels_cpu.LIMIT, ids=str)
def test_the_cpu_paths_agree_with_float64(dtype):
    """It refuses to time a path whose result is wrong; here all are right and each is timed."""
    for site in TINY.sites:
        rows = kernels_cpu.site_rows(TINY, site, 24, dtype, rounds=1, read_bytes=1 << 16)
        assert {row["path"] for row in rows} >= {"step", "segments, B column-major", "adapters"} and len(rows) == 4
        assert all(0 < row["error"] < kernels_cpu.LIMIT[dtype] and row["ms"] > 0 and row["share"] > 0 for row in rows)


def test_a_gpu_host_needs_nothing_but_its_own_packages():
    """It has numpy, torch, cupy and what torch brings; kernels_cuda and bench.kernels travel."""
    allowed = {"kernels_cuda", "numpy", "torch", "cupy", "triton", *sys.stdlib_module_names}
    for file in sorted((ROOT / "bench" / "kernels").rglob("*.py")):
        found = re.findall(r"^\s*(?:from|import) ([\w.]+)", file.read_text(), re.MULTILINE)
        others = [name for name in found if not name.startswith("bench.kernels")]
        assert {name.split(".")[0] for name in others} <= allowed, file
