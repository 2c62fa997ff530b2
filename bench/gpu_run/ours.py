"""Stage `ours`: our kernels at every cell of bench.kernels, then variants at two cells, then ncu on the same two.

Mixtral and Qwen3 come first. After a cut it goes on with the cells that are missing.
"""

from __future__ import annotations

import argparse
import csv
import io
import subprocess
import sys
from typing import Any

import torch

from bench.gpu_run import one_cell, stage, variants
from bench.gpu_run.record import Record
from bench.kernels import measure, ours
from bench.kernels.__main__ import hardware
from bench.kernels.models import MODELS
from lora_server.demo import children

TOKENS = (64, 256, 1024)
LOOKED_AT = (("mixtral-8x7b", "gate_up", 256), ("qwen3-30b-a3b", "gate_up", 64))
SECTIONS = ("SpeedOfLight", "MemoryWorkloadAnalysis", "SchedulerStats", "WarpStateStats", "LaunchStats", "Occupancy")
NCU_SECONDS = 60.0


def measure_cells(record: Record) -> None:
    """Every model, site and number of tokens that the record lacks."""
    gpu = measure.Gpu(torch.device("cuda", 0))
    record.add("hardware", **hardware(), read_gbps=round(gpu.read_gbps, 1))
    if not record.find("overhead"):
        record.add("overhead", **measure.overhead_us(gpu))
    for model in MODELS.values():
        for site in model.sites:
            about = {"model": model.name, "site": site.name}
            left = [count for count in TOKENS if not record.find("site", **about, tokens=count)]
            if not left:
                continue
            adapters = ours.Adapters(model, site, torch.Generator(gpu.device).manual_seed(measure.SEED))
            for count in left:
                record.add("site", **measure.site_result(model, site, count, adapters, gpu))
            del adapters
            torch.cuda.empty_cache()


def profile(record: Record, model: str, site: str, tokens: int) -> None:
    """Record what ncu counts during one launch: a line per metric, or the reason why there is none."""
    about = {"model": model, "site": site, "tokens": tokens}
    if record.find("ncu", **about):
        return
    try:
        done = subprocess.run(
            children.own(ncu(model, site, tokens)), capture_output=True, text=True, timeout=NCU_SECONDS
        )
    except subprocess.TimeoutExpired:
        record.add("ncu", **about, reason=f"not done within {NCU_SECONDS:g} s")
        return
    found = metrics(done.stdout)
    for line in found:
        record.add("ncu", **about, **line)
    if not found:
        last = (done.stdout + done.stderr).strip()[-300:]
        record.add("ncu", **about, reason=f"no metrics, it ended with {done.returncode}: {last}")


def ncu(model: str, site: str, tokens: int) -> list[str]:
    """The profiler around one launch of `lora_step`, clocks as they are."""
    sections = [flag for section in SECTIONS for flag in ("--section", section)]
    return [
        "ncu", "--clock-control", "none", *sections, "--kernel-name", "regex:lora_step", "--launch-skip",
        str(one_cell.WARM_UP), "--launch-count", "1", "--csv", "--page", "details",
        sys.executable, "-m", "bench.gpu_run.one_cell", model, site, str(tokens),
    ]  # fmt: skip


def metrics(said: str) -> list[dict[str, Any]]:
    """{metric, unit, value} of ncu's CSV, which has its own messages before and between."""
    table = "\n".join(line for line in said.splitlines() if line.startswith('"'))
    return [
        {"metric": row["Metric Name"], "unit": row.get("Metric Unit", ""), "value": row["Metric Value"]}
        for row in csv.DictReader(io.StringIO(table))
        if row.get("Metric Name") and row.get("Metric Value")
    ]


def check(*_: object) -> None:
    """Check that the profiled cells exist, and that their commands' arguments parse."""
    for cell in LOOKED_AT:
        one_cell.parse(ncu(*cell)[-3:])
        variants.cell(*cell)


def work(record: Record, _: argparse.Namespace) -> bool:
    """Cells, variants, counters; whether every cell was measured and right enough to be counted."""
    measure_cells(record)
    for cell in LOOKED_AT:
        variants.measure(record, *cell)
    for cell in LOOKED_AT:
        profile(record, *cell)
    sites = record.find("site")
    wrong = [site for site in sites if not site["max_rel_err"] < one_cell.MOST_ERROR]
    for site in wrong:
        name = f"{site['model']} {site['site']} {site['tokens']}"
        record.add("wrong", name=name, good=False, reason=f"relative error {site['max_rel_err']:.2g}")
    return not wrong


if __name__ == "__main__":
    stage.main(work, stage.parser(__doc__).parse_args(), modules=("cupy",), check=check)
