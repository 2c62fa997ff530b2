"""The stage `codes` of bench.gpu_run, on this CPU: it plays, and finds what is wrong."""

from __future__ import annotations

import argparse

import pytest
import torch

from bench.gpu_run import codes
from bench.gpu_run.record import Checks, Record
from lora_server.transport import e4m3
from tests.support.gpu import emulated, emulated_gpu
from tests.support.workload import spec_of

pytestmark = pytest.mark.skipif(bool(emulated.MISSING), reason=emulated.MISSING)


def test_other_codes_fail_the_stage_and_nothing_else(tmp_path, monkeypatch):
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
    record, given = Record(tmp_path / "record"), argparse.Namespace(**codes.EMULATED)
    checks = Checks(record)
    try:
        codes.served(record, checks, tmp_path, "e4m3", given)
    finally:
        del emulated_gpu.opened.openers["cpu"]
    lines = record.find("check")
    assert len(lines) == 8 and [line["name"] for line in lines if not line["good"]] == [
        "odd rows' codes are the host's"
    ]
    assert not checks.good and len(record.find("latency")) == 2


def test_the_bound_takes_rows_of_this_wire_and_no_others(tiny_adapters):
    """Not what a base model answers, nor a neighbour's delta."""
    spec, x = spec_of("mixtral"), torch.randn(8, 64, generator=torch.Generator().manual_seed(3)).bfloat16()
    values, bound = codes.exact(tiny_adapters["all"], spec, x)
    carried, scales = torch.empty(x.shape, dtype=torch.float8_e4m3fn), torch.empty(8)
    e4m3.quantise(x, carried, scales)
    near = codes.exact(tiny_adapters["all"], spec, e4m3.expand(carried, scales))[0]
    assert values.any() and not torch.equal(near, values) and ((near - values).abs() <= bound).all()
    for wrong in (torch.zeros_like(values), values.roll(1, 0), values * 1.5):
        assert ((wrong - values).abs() > bound).any()
    assert 0.01 < (near - values).norm() / values.norm() < codes.MOST_LOST
