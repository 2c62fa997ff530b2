"""Stage `correctness`: the cases of `bench.kernels --correctness`, one line each; after a cut it goes on."""

from __future__ import annotations

import argparse
import time

import torch

from bench.gpu_run import stage
from bench.gpu_run.record import Record
from bench.kernels import correctness

COUNT, SEED = 60, 1


def work(record: Record, _: argparse.Namespace) -> bool:
    """Run all cases that are not recorded yet. Returns whether all are right."""
    device = torch.device("cuda", 0)
    ways = correctness.launches(device)
    for case in correctness.cases(COUNT, SEED):
        if record.find("case", name=str(case)):
            continue
        began = time.monotonic()
        result = correctness.check(case, device, ways)
        facts = {name: result[name] for name in ("error", "rounding", "same_bits")}
        facts["good"] = correctness.right(result)
        record.add("case", name=str(case), **facts, seconds=round(time.monotonic() - began, 2))
    return all(line["good"] for line in record.find("case"))


if __name__ == "__main__":
    stage.main(work, stage.parser(__doc__).parse_args(), modules=("cupy",))
