"""bench.kernels: everything of it that runs without a GPU, and its steps through the emulated kernels."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import emulated
import numpy as np
import pytest
import torch

from bench import fetch_peers, kernels_cpu
from bench.kernels import __main__ as command
from bench.kernels import balance, correctness, draws, floor, ours, peer_process, peers, report, roofline
from bench.kernels.models import MODELS, NUM_ADAPTERS, Model
from bench.kernels.peers import vllm
from kernels_cuda import layout, routing
from kernels_cuda.heuristics import Variant

SMALL = Variant(bulk_copy=True, warps=2)
TINY = Model("tiny", 256, 64, 4, 2, 16)
ROOT = Path(__file__).parents[3]
needs_emulator = pytest.mark.skipif(bool(emulated.MISSING), reason=emulated.MISSING)

# reference figures at 4.3 TB/s: D, rows per segment, MB of gate_up and down, us of gate_up and of down
TABLE = {
    ("mixtral-8x7b", 64): (89, 1.44, 420, 210, 99, 50),
    ("mixtral-8x7b", 256): (254, 2.01, 1199, 600, 286, 144),
    ("mixtral-8x7b", 1024): (671, 3.05, 3165, 1582, 765, 386),
    ("qwen3-30b-a3b", 64): (448, 1.14, 161, 81, 38, 19),
    ("qwen3-30b-a3b", 256): (1421, 1.44, 512, 256, 121, 62),
    ("qwen3-30b-a3b", 1024): (4065, 2.02, 1465, 733, 348, 181),
    ("gpt-oss-20b", 64): (203, 1.26, 300, 150, 70, 36),
    ("gpt-oss-20b", 256): (607, 1.69, 895, 447, 211, 107),
    ("gpt-oss-20b", 1024): (1670, 2.45, 2462, 1231, 585, 297),
    ("dbrx", 64): (178, 1.44, 769, 385, 182, 91),
    ("dbrx", 256): (508, 2.01, 2198, 1099, 522, 264),
    ("dbrx", 1024): (1341, 3.05, 5802, 2901, 1393, 707),
}


def test_the_roofline_gives_the_reference_figures():
    rows = {(r["model"], r["tokens"], r["site"]): r for r in roofline.table(list(MODELS.values()), [64, 256, 1024])}
    assert len(rows) == 2 * len(TABLE)
    for (name, tokens), (pairs, per_segment, gate_up_mb, down_mb, gate_up_us, down_us) in TABLE.items():
        gate_up, down = rows[name, tokens, "gate_up"], rows[name, tokens, "down"]
        assert gate_up["distinct_pairs"] == pytest.approx(pairs, abs=0.6)
        assert gate_up["rows_per_segment"] == pytest.approx(per_segment, abs=0.006)
        assert gate_up["weights_mb"] == pytest.approx(gate_up_mb, abs=0.6)
        assert down["weights_mb"] == pytest.approx(down_mb, abs=0.6)
        assert gate_up["floor_us"] == pytest.approx(gate_up_us, abs=0.6)
        # those figures count a result per (token, expert) of down; our floor only the sum per token
        model = MODELS[name]
        more_us = tokens * (model.top_k - 1) * model.hidden * 2 / roofline.GBPS / 1e3
        assert down["floor_us"] + more_us == pytest.approx(down_us, abs=1)


def test_our_layout_reads_what_the_weights_are():
    """Ranks and widths of these models fill whole fragments, so the layout adds no byte."""
    for model in MODELS.values():
        for site in model.sites:
            assert site.shape.read_bytes == site.a_bytes + site.b_bytes
            assert site.shape.num_tiles * layout.TILE_BYTES < 1.07 * site.shape.read_bytes


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_draws_match_the_formula(model):
    counts = [draws.distinct_pairs(draws.draw(model, 256, seed), model.num_experts) for seed in range(40)]
    expected = floor.expected_pairs(model, 256)
    deviation = np.std(counts, ddof=1) / np.sqrt(len(counts))
    assert abs(np.mean(counts) - expected) < 4 * deviation + 1
    step = draws.draw(model, 256, 3)
    assert all(len(set(experts)) == model.top_k for experts in step.experts_Tk)
    assert step.adapters_T.min() >= 0 and step.adapters_T.max() < NUM_ADAPTERS
    np.testing.assert_allclose(step.weights_Tk.sum(axis=1), 1, rtol=1e-6)
    again = draws.draw(model, 256, 3)
    assert all(np.array_equal(a, b) for a, b in zip(step, again, strict=True)), "a seed is a draw"
    assert not np.array_equal(step.experts_Tk, draws.draw(model, 256, 4).experts_Tk)


def test_distinct_pairs_are_the_segments():
    model = MODELS["qwen3-30b-a3b"]
    for step in draws.draws(model, 64):
        directory = np.tile(np.int32([0, 0, 1]), (NUM_ADAPTERS, 1))
        segments = routing.reference(*step, directory, model.num_experts).segments
        assert len(segments) == draws.distinct_pairs(step, model.num_experts)


class Emulated:
    """The kernels' and the router's launch, on this CPU."""

    def __init__(self, variant=SMALL):
        self.variant = variant

    def launch(self, step, out, workspace, kernel="lora_step"):
        emulated.launch(step, out, workspace, self.variant, kernel=kernel)


class EmulatedRouter:
    def launch(self, *arguments):
        emulated.run("route", routing.arguments(*arguments), SMALL, source="route.cu")


@needs_emulator
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
    ours.route(draw, EmulatedRouter())
    ours.launch(draw, Emulated(), ours.workspace_for(TINY, site, 12, torch.device("cpu")))
    assert ours.sampled_error(draw, adapters, 100, 0) < 3e-3
    draw.out[5] *= 1.1
    assert ours.sampled_error(draw, adapters, 100, 0) > 0.09, "the check must see one wrong row"
    draw.out[5] = float("nan")
    assert ours.sampled_error(draw, adapters, 100, 0) == float("inf")


@needs_emulator
@pytest.mark.parametrize("popularity", correctness.POPULARITY)
@pytest.mark.parametrize("combine", [False, True])
def test_the_correctness_mode_passes_and_can_fail(popularity, combine):
    case = correctness.Case(300, 70, 12, popularity, combine, torch.bfloat16, 5)
    right, slow = Emulated().launch, Emulated(Variant(bulk_copy=False, warps=1)).launch
    result = correctness.check(case, torch.device("cpu"), [right, slow])
    assert result["same_bits"] and 0 < result["error"] < correctness.LIMIT[torch.bfloat16]

    def wrong(step, out, workspace, kernel):
        right(step, out, workspace, kernel)
        if kernel != "shrink":
            out[0, :3] += 1 + torch.rand(1, dtype=torch.float32).to(out.dtype)

    assert correctness.check(case, torch.device("cpu"), [wrong])["error"] > 1e-3
    assert not correctness.check(case, torch.device("cpu"), [right, wrong])["same_bits"]


@needs_emulator
@pytest.mark.parametrize("combine", [False, True])
def test_the_correctness_mode_takes_steps_without_entries(combine):
    case = correctness.Case(40, 24, 0, "zipf", combine, torch.float16, 5)
    result = correctness.check(case, torch.device("cpu"), [Emulated().launch])
    assert result == {"case": str(case), "error": 0.0, "same_bits": True}


def test_the_cases_cover_every_width_and_popularity():
    found = correctness.cases(60, 1)
    assert {case.in_width for case in found} == set(correctness.WIDTHS)
    assert {(case.entries, case.popularity) for case in found} >= {
        (rows, kind) for rows in correctness.ROWS for kind in correctness.POPULARITY
    }
    assert {case.combine for case in found} == {False, True}


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


def test_a_peer_that_cannot_be_loaded_says_why(tmp_path):
    with pytest.raises(peers.PeerMissingError, match="nowhere is missing; run"):
        peers.load("vllm", tmp_path / "nowhere")
    for name in ("vllm", "sglang", "punica"):
        with pytest.raises(peers.PeerMissingError, match="No module named"):
            peers.load(name, tmp_path)
    with pytest.raises(peers.PeerMissingError, match="got peer 'x', expected one of vllm, sglang, punica"):
        peers.load("x", tmp_path)


def test_peers_that_die_leave_the_run_alone(tmp_path):
    """Real processes: without their files (and without a GPU) every peer is an error line."""
    lines = peer_process.collect("mixtral-8x7b", "down", [64], ["vllm", "punica"], tmp_path / "nowhere")
    assert [line["peer"] for line in lines] == ["vllm", "punica"]
    assert all("nowhere" in line["error"] for line in lines)


def test_a_process_that_ends_badly_costs_one_peer(monkeypatch, tmp_path):
    """A stand-in for Python that begins the first peer, then ends with 3."""
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    (tmp_path / "python").write_text(
        '#!/bin/sh\nfor last; do :; done\necho "{\\"peer\\": \\"${last%%,*}\\", \\"begin\\": true}"\nexit 3\n'
    )
    (tmp_path / "python").chmod(0o755)
    lines = peer_process.collect("dbrx", "down", [64], ["vllm", "sglang", "punica"], tmp_path)
    assert [line["peer"] for line in lines] == ["vllm", "sglang", "punica"]
    assert all("its process ended with 3" in line["error"] for line in lines)


def test_a_process_that_takes_too_long_costs_one_peer(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    (tmp_path / "python").write_text(
        '#!/bin/sh\nfor last; do :; done\necho "{\\"peer\\": \\"${last%%,*}\\", \\"begin\\": true}"\nexec sleep 60\n'
    )
    (tmp_path / "python").chmod(0o755)
    lines = peer_process.collect("dbrx", "down", [64], ["vllm", "sglang"], tmp_path, seconds=0.5)
    assert [line["peer"] for line in lines] == ["vllm", "sglang"]
    assert all(line["error"] == "its process took more than 0.5 s" for line in lines)


def example():
    def site(tokens, name, us, floor_us, error):
        found = {"model": "dbrx", "tokens": tokens, "site": name, "us": us, "with_routing_us": us + 5}
        return {**found, "floor_us": floor_us, "floor_ratio": floor_us / us, "max_rel_err": error}

    def peer(name, tokens, site, us):
        return {"model": "dbrx", "tokens": tokens, "site": site, "peer": name, "us": us, "option": {"mode": "x"}}

    sites = [site(64, "gate_up", 200.0, 180.0, 1e-3), site(64, "down", 100.0, 90.0, 2e-3),
             site(256, "gate_up", 500.0, 400.0, 1e-3), site(256, "down", 300.0, 240.0, 1e-3)]  # fmt: skip
    lines = [peer("vllm", 64, "gate_up", 900.0), peer("vllm", 64, "down", 300.0), peer("sglang", 64, "gate_up", 10.0),
             {"model": "dbrx", "site": "down", "peer": "sglang", "error": "no option ran and was right"}]  # fmt: skip
    return sites, lines


def test_cells_add_up_the_sites_and_skip_peers_that_were_not_right_at_all_of_them():
    found = report.cells(*example())
    assert [list(cell) for cell in found] == [
        ["model", "tokens", "floor_ratio", "peer_ratio", "fastest_peer", "max_rel_err"]
    ] * 2
    assert found[0] == {"model": "dbrx", "tokens": 64, "floor_ratio": pytest.approx(0.9), "peer_ratio": 4.0,
                        "fastest_peer": "vllm", "max_rel_err": 2e-3}  # fmt: skip
    assert found[1]["peer_ratio"] is None and found[1]["fastest_peer"] is None


def test_the_result_is_written_and_merged(tmp_path, monkeypatch, capsys):
    sites, lines = example()
    result = {"cells": report.cells(sites, lines), "overhead_us": 7.5, "overhead_in_sequence_us": 4.0, "empty_us": 2.0,
              "command": "python -m bench.kernels", "hardware": {"gpu": "some"}, "read_gbps": 4000.0, "sites": sites,
              "peers": lines}  # fmt: skip
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for file in files:
        file.write_text(json.dumps(result))
    out = tmp_path / "results" / "all.json"
    monkeypatch.setattr(sys, "argv", ["x", "--merge", *map(str, files), "--out", str(out), "--json"])
    command.main()
    whole = json.loads(out.read_text())
    assert whole == json.loads(capsys.readouterr().out)
    assert len(whole["cells"]) == 4 and {"cells", "overhead_us", "command", "hardware"} <= whole.keys()
    text = out.with_suffix(".md").read_text()
    assert "no option ran and was right" in text and "| dbrx" in text and "7.5 us" in text


def test_the_balance_model_counts_tiles_and_bands():
    """1056 warps: 2112 jobs of one row and one of 32, which is four times as long; then a step of one row each."""
    rows = np.array([1] * 1056 + [32] + [1] * 1056)
    phase = balance.Phase("expand", rows, np.ones(len(rows), np.int64))
    assert phase.nbytes == 2113 * 8192 and phase.mean(1.0) == pytest.approx(2116 / 1056)
    assert phase.slowest(balance.equal, 1.0) == 1 + 4
    assert phase.slowest(balance.job_cost, 1.0) == 4
    lonely = phase._replace(rows_J=np.ones_like(rows))
    assert lonely.slowest(balance.job_cost, 1.0) == lonely.slowest(balance.equal, 1.0) == 3


def test_weighed_shares_are_more_even_where_segments_are_long():
    model = MODELS["mixtral-8x7b"]
    for row in balance.table([model], [256], roofline.GBPS):
        assert row["weighed_us"] < 0.6 * row["equal_us"], "as modelled"
    bytes_us = {(r["site"], r["phase"]): r["bytes_us"] for r in balance.table([model], [64], roofline.GBPS)}
    floor_us = next(r for r in roofline.table([model], [64], roofline.GBPS) if r["site"] == "gate_up")
    assert bytes_us["gate_up", "shrink"] == pytest.approx(floor_us["shrink_us"], rel=0.08)
    assert bytes_us["gate_up", "expand"] == pytest.approx(floor_us["expand_us"], rel=0.08)
    by_cost = {row["cost"]: row for row in balance.unevenness([model], [256])}
    assert by_cost["1 + 2 bands"]["band 0.75 %"] < by_cost["1"]["band 0.75 %"]


def test_the_roofline_command_needs_no_gpu():
    done = subprocess.run(
        [sys.executable, "-m", "bench.kernels", "--roofline", "--json", "--models", "dbrx", "--tokens", "64"],
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert [row["site"] for row in json.loads(done.stdout)] == ["gate_up", "down"]
    with pytest.raises(SystemExit, match="--models: got nothing, expected some of mixtral"):
        command.models_of("dbrx,nothing")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--models", "mixtral"], "--models: got mixtral, expected some of mixtral-8x7b"),
        (["--tokens", "64,many"], "--tokens: got 'many'"),
        (["--roofline", "--tokens", "0"], "--tokens: got '0'"),
        (["--balance", "--tokens", "x"], "--tokens: got 'x'"),
        (["--peers", "vllm,peft"], "--peers: got peft"),
    ],
)
def test_wrong_flags_are_named_before_anything_runs(arguments, reason, monkeypatch):
    monkeypatch.setattr("sys.argv", ["bench.kernels", *arguments])
    with pytest.raises(SystemExit, match=reason):
        command.main()


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
@pytest.mark.parametrize("arguments", [["--correctness"], ["--tokens", "64"]])
def test_without_a_gpu_it_says_so(arguments, monkeypatch):
    monkeypatch.setattr("sys.argv", ["bench.kernels", *arguments])
    with pytest.raises(SystemExit, match="no NVIDIA GPU here"):
        command.main()


def test_only_wanted_files_leave_a_wheel(tmp_path):
    import zipfile

    wheel = tmp_path / "x-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in ("keep/a.py", "keep/deep/b.py", "keep/c.so", "other/d.py", "keep/../../e.py"):
            archive.writestr(name, name)
    found = fetch_peers.extract(wheel, ("keep/",), tmp_path / "out")
    assert sorted(found) == ["keep/a.py", "keep/deep/b.py"]
    assert sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*.py")) == [
        "out/keep/a.py",
        "out/keep/deep/b.py",
    ]
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
    allowed = {"bench", "kernels_cuda", "numpy", "torch", "cupy", "triton", *sys.stdlib_module_names}
    for file in sorted((ROOT / "bench" / "kernels").rglob("*.py")):
        found = set()
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                found.add(str(node.module))
        assert {name.split(".")[0] for name in found} <= allowed, file
        assert all(name.startswith("bench.kernels") for name in found if name.startswith("bench")), file
