"""Stages of bench.gpu_run on this CPU: they play, and they find what is wrong."""

from __future__ import annotations

import argparse
import shutil
import subprocess

import pytest
import torch

from bench.gpu_run import (
    codes,
    inproc,
    nvshmem,
    ours,
    put_timing,
    record,
    registers,
    sanitized,
    sanitizer,
    variants,
    world,
)
from kernels_cuda.residency import ThreadBlock
from lora_server.device.nvshmem import nvshmem_build
from lora_server.errors import AdapterError
from lora_server.transport import e4m3
from tests.support.bounds import quantised
from tests.support.gpu import emulated_gpu
from tests.support.workload import spec_of

SECONDS = 60.0


@pytest.fixture(autouse=True)
def no_gpu_afterwards():
    """Take this CPU back, which a stage may use as its GPU."""
    yield
    emulated_gpu.opened.openers.pop("cpu", None)


def test_the_sanitizers_verdict_is_read():
    clean = "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n"
    assert sanitizer.judged(0, clean) == (True, "ERROR SUMMARY: 0 errors")
    found = "========= Invalid __global__ read of size 4 bytes\n========= ERROR SUMMARY: 1 error\n"
    good, reason = sanitizer.judged(sanitizer.FOUND, found)
    assert not good and "1 error" in reason and "Invalid __global__ read" in reason
    assert sanitizer.judged(1, "its result is wrong") == (False, "ended with 1: its result is wrong")
    assert not sanitizer.judged(0, "no summary: the tool did not run")[0]
    assert sanitizer.REFUSED in sanitizer.judged(255, "========= Error: Device not supported\n")[1]


def test_metrics_are_read_out_of_ncus_csv():
    said = """==PROF== Connected to process 12
"ID","Kernel Name","Section Name","Metric Name","Metric Unit","Metric Value","Rule Name"
"0","lora_step_bfloat16","GPU Speed Of Light Throughput","Duration","us","1,286.1",""
"0","lora_step_bfloat16","SpeedOfLight","","","","SOLBottleneck"
==PROF== Disconnected from process 12
"""
    assert ours.metrics(said) == [{"metric": "Duration", "unit": "us", "value": "1,286.1"}]
    assert ours.metrics("==ERROR== nothing") == []


def test_the_put_that_is_timed_is_the_transports():
    rows, word = torch.zeros(4, 8, dtype=torch.bfloat16), torch.zeros(8, dtype=torch.int64)
    order = torch.tensor([3, 1, 0, 2], dtype=torch.int32)
    one = put_timing.step(rows, order, torch.empty_like(rows), word, 7, order[:1])
    assert one.kernel in ("put_vectors", "put_halves")
    assert {rows.data_ptr(), order.data_ptr(), word.data_ptr(), 7, 4, 16} <= set(one.arguments())


def test_variants_fit_a_hopper():
    assert all(variant.shared_bytes <= 232_448 for variant in variants.VARIANTS)


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ here")
def test_the_cstdint_of_the_nvshmem_build_is_c(tmp_path):
    checks = "sizeof(int_fast16_t) == 8 && sizeof(uint_least32_t) == 4 && INT64_MAX > 0 && UINT8_MAX == 255"
    (tmp_path / "x.cpp").write_text(f"{nvshmem_build.cstdint()}static_assert({checks});")
    subprocess.run(["g++", "-std=c++17", "-w", "-fsyntax-only", str(tmp_path / "x.cpp")], check=True, timeout=60)


@pytest.mark.parametrize("size", nvshmem.WORLDS)
def test_the_nvshmem_stage_plays_with_pes_that_have_no_gpu_and_fails_where_one_gets_nothing(tmp_path, size):
    found = record.Record(tmp_path / "record")
    (tmp_path / "lost").touch()
    assert not nvshmem.play(found, nvshmem.World(size, tmp_path / "module", "tests.support.gpu.gpu_pe"))
    assert [line["good"] for line in found.find("check")] == [True, False], "and nothing after it"
    assert "turn 1: [{'event': 'waited', 'took_ns': -1" in found.find("check")[1]["reason"]
    (tmp_path / "lost").unlink()
    found = record.Record(tmp_path / "anew")
    assert nvshmem.play(found, nvshmem.World(size, tmp_path / "module", "tests.support.gpu.gpu_pe"))
    lines = found.find("check")
    assert [line["name"] for line in lines] == list(nvshmem.STEPS) and all(line["good"] for line in lines)
    assert lines[2]["found"]["contexts"] == ["alive"] * (size - 1)


def test_a_world_whose_engine_answers_wrongly_or_not_at_all_fails_its_stage(tmp_path, monkeypatch):
    found, given = record.Record(tmp_path / "record"), argparse.Namespace(**world.EMULATED)
    engine = world.Engine("tests.support.gpu.gpu_pe", ["1", "2", str(tmp_path / "module")])
    monkeypatch.setitem(world.STEPS, "answers", lambda its: engine.answer("generated", SECONDS))
    monkeypatch.setitem(world.STEPS, "timed", lambda its: engine.answer("measured", 0.01))
    engine.tell(uid="ab")
    place = world.World(None, tmp_path, tmp_path, given)
    try:
        assert not world.attempt(found, place, "answers") and not world.attempt(found, place, "timed")
    finally:
        engine.end()
    other, late = found.find("check")
    assert "expected 'generated', got {'event': 'module'" in other["reason"]
    assert late["reason"].startswith("RuntimeError")


@pytest.mark.long
@pytest.mark.emulator
def test_other_codes_fail_the_stage_codes_and_nothing_else(tmp_path, monkeypatch):
    """A rule by which the second kind of rows, the odd ones, would have twice the scale of one row."""
    rule, calls = codes.by_the_host, []

    def other(x_TK):
        found, scales_T = rule(x_TK)
        calls.append(x_TK)
        scales_T[0] *= len(calls)
        return found, scales_T

    monkeypatch.setattr(codes, "by_the_host", other)
    emulated_gpu.compile_all(in_codes=True)
    emulated_gpu.use()
    found, given = record.Record(tmp_path / "record"), argparse.Namespace(**codes.EMULATED)
    checks = record.Checks(found)
    codes.served(found, checks, tmp_path, "e4m3", given)
    lines = found.find("check")
    wrong = [line["name"] for line in lines if not line["good"]]
    assert len(lines) == 8 and wrong == ["odd rows' codes are the host's"]
    assert not checks.good and len(found.find("latency")) == 2


def play_inproc(tmp_path, **instead):
    emulated_gpu.compile_all()
    given = inproc.parser().parse_args(["--record", str(tmp_path / "record")])
    vars(given).update(inproc.EMULATED, tokens="4", rounds=1, steps=2, **instead)
    found = record.Record(given.record)
    return found, inproc.work(found, given)


@pytest.mark.emulator
@pytest.mark.parametrize("wrong", ["", "weights", "bits"])
def test_the_stage_inproc_plays_and_finds_other_answers(tmp_path, monkeypatch, wrong):
    """Weights: the reference believes in other adapters. Bits: the last answer is not the first one's."""
    if wrong == "weights":
        delta = inproc.Files.delta
        monkeypatch.setattr(inproc.Files, "delta", lambda files, adapter, *rest: delta(files, adapter + 1, *rest))
    if wrong == "bits":
        endure, end, cells = inproc.endure, inproc.Churn.end, list[inproc.Cell]()
        noted = lambda its, cell, given: cells.append(cell) or endure(its, cell, given)  # noqa: E731
        monkeypatch.setattr(inproc, "endure", noted)
        monkeypatch.setattr(inproc.Churn, "end", lambda churn: (end(churn), cells[-1].parts[0].x.add_(1)))
    found, good = play_inproc(tmp_path)
    checks = {line["name"]: line["good"] for line in found.find("check")}
    assert len(checks) == 4 and good == (not wrong)
    for name, right in checks.items():
        assert right == (wrong not in {"sampled rows": ["weights"]}.get(name.split(": ")[1], ["bits"])), name
    (alone, cell) = found.find("inproc")
    assert {"us", "warm_us", "put_us", "answer_us", "add_us"} <= alone.keys() and cell["cell"] == "EP4, 4 tokens"
    assert all(line["steps"] >= 2 and line["loads"] for line in found.find("steps"))


@pytest.mark.emulator
def test_a_load_that_fails_beside_steps_fails_the_stage(tmp_path, monkeypatch):
    endure = inproc.endure

    def without_files(its, cell, given):
        for path in cell.its.files._paths:
            shutil.rmtree(path)
        return endure(its, cell, given)

    monkeypatch.setattr(inproc, "endure", without_files)
    with pytest.raises(AdapterError):
        play_inproc(tmp_path)


@pytest.mark.emulator
def test_the_sanitizers_case_of_a_kernel_that_serves_is_right():
    emulated_gpu.compile_all()
    assert sanitized.answered(emulated_gpu.use())


def test_kernels_without_room_beside_one_that_serves_are_named():
    serving, clients = {"serve": ThreadBlock(9, 160)}, {"wait": ThreadBlock(1, 20), "put": ThreadBlock(8, 64)}
    assert registers.crowded(serving, clients) == ["put beside serve"]
    assert registers.crowded({"serve": ThreadBlock(8, 162)}, clients) == []


@pytest.mark.emulator
def test_the_bound_of_codes_takes_rows_of_this_wire_and_no_others(tiny_adapters):
    """Not what a base model answers, nor a neighbour's delta."""
    spec, x = spec_of("mixtral"), torch.randn(8, 64, generator=torch.Generator().manual_seed(3)).bfloat16()
    values, bound = codes.exact(tiny_adapters["all"], spec, x)
    near = codes.exact(tiny_adapters["all"], spec, e4m3.expand(*quantised(x)))[0]
    assert values.any() and not torch.equal(near, values) and ((near - values).abs() <= bound).all()
    for wrong in (torch.zeros_like(values), values.roll(1, 0), values * 1.5):
        assert ((wrong - values).abs() > bound).any()
    assert 0.01 < (near - values).norm() / values.norm() < codes.MOST_LOST
