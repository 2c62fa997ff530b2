"""Stage `sanitizer`: compute-sanitizer's memcheck and racecheck over our kernels in a few small cases.

Only kernels of ours are instrumented. torch caches no memory meanwhile, so that what lies beyond a tensor is beyond
an allocation. Cases run beside each other: most of their time is start-up.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from bench.gpu_run import sanitized, stage
from bench.gpu_run.record import Record
from lora_server.demo import children

TOOLS = ("memcheck", "racecheck")
KERNELS = ("lora_step", "route", "serve", "link")
FOUND = 86  # the exit status by which it says that it found something
AT_ONCE, CASE_SECONDS = 4, 42.0
REFUSED = "Device not supported"


def command(tool: str, name: str) -> list[str]:
    """compute-sanitizer around one case."""
    kernels = [flag for kernel in KERNELS for flag in ("--kernel-name", f"kernel_substring={kernel}")]
    return [
        "compute-sanitizer", "--tool", tool, *kernels, "--error-exitcode", str(FOUND), "--print-limit", "20",
        sys.executable, "-m", "bench.gpu_run.sanitized", name,
    ]  # fmt: skip


def judged(status: int, said: str) -> tuple[bool, str]:
    """Whether nothing was found and the result was right; else why."""
    marked = [line for line in said.splitlines() if line.startswith("=========")]
    summary = next((line.strip("= ") for line in reversed(marked) if "SUMMARY" in line), "")
    if REFUSED in said:
        return False, f"compute-sanitizer refuses this GPU: {REFUSED}"
    if status == 0 and summary:
        return True, summary
    if status == FOUND:
        first = next((line.strip("= ") for line in marked if "Invalid" in line or "Race" in line), "")
        return False, "; ".join(part for part in (summary, first) if part) or "it found something"
    last = said.strip().splitlines()[-1:] or ["it said nothing"]
    return False, f"ended with {status}: {last[0]}"[:400]


def check_one(tool: str, name: str) -> dict[str, Any]:
    """One case under one tool."""
    began = time.monotonic()
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    try:
        done = subprocess.run(
            children.own(command(tool, name)), capture_output=True, text=True, timeout=CASE_SECONDS, env=environment
        )
        good, reason = judged(done.returncode, done.stdout + done.stderr)
    except subprocess.TimeoutExpired:
        good, reason = False, f"not done within {CASE_SECONDS:g} s"
    return {"tool": tool, "name": name, "good": good, "reason": reason, "seconds": round(time.monotonic() - began, 1)}


def check(*_: object) -> None:
    """Check that every command can be put together, and names a case that exists."""
    for name in sanitized.CASES:
        assert command(TOOLS[0], name)[-1] == name


def work(record: Record, _: argparse.Namespace) -> bool:
    """Both tools over all cases; whether nothing was found."""
    first, *rest = ((tool, name) for tool in TOOLS for name in sanitized.CASES)
    found = [check_one(*first)]
    if REFUSED in found[0]["reason"]:
        raise stage.Unable(found[0]["reason"])
    record.add("check", **found[0])
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for line in pool.map(lambda pair: check_one(*pair), rest):
            record.add("check", **line)
            found.append(line)
    return all(line["good"] for line in found)


if __name__ == "__main__":
    stage.main(work, stage.parser(__doc__).parse_args(), modules=("cupy",), tools=("compute-sanitizer",), check=check)
