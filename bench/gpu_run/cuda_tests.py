"""Stage `tests`: `pytest -m cuda` over every file that has such tests, each test's result written as it comes.

On several processes where pytest-xdist is installed: most of a test's time is its reference on the CPU. Stage `live`:
`--file test_gpu_live.py` alone, in one process, since it tells how long calls take beside a kernel.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import pytest

from bench.gpu_run import stage
from bench.gpu_run.record import Record
from bench.gpu_run.state import ROOT
from lora_server.transport.environment import prepare_environment

PROCESSES = 4
ALONE = "test_gpu_live.py"  # it asserts how long calls take: beside other processes' kernels they take longer
# a GPU host's packages are not those of constraints.txt, and their warnings are not our tests' failures
FLAGS = ("-m", "cuda", "-q", "-W", "default", "--rootdir", str(ROOT))


class Reports:
    """A pytest plugin: counts what is collected, records what was run."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self.collected: dict[str, int] = {}
        self.failed = self.ran = 0

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            self.collected[item.path.name] = self.collected.get(item.path.name, 0) + 1

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.passed:
            return  # set-up and clean-up count where they fail or skip
        reason = {} if report.passed else {"reason": str(report.longrepr)[-600:]}
        self.ran += report.passed
        self.failed += report.failed
        facts = {"outcome": report.outcome, "seconds": round(report.duration, 2), **dict(report.user_properties)}
        good = {} if report.skipped else {"good": report.passed}
        self.record.add("test", name=report.nodeid, **facts, **reason, **good)


def files(only: str = "") -> list[Path]:
    """Test files with tests for GPUs, the kernels' own first; or one of them."""
    if only:
        return list((ROOT / "tests").rglob(only))
    vllm = ROOT / "tests" / "vllm"  # which has an environment of its own
    found = [path for path in (ROOT / "tests").rglob("test_*.py") if vllm not in path.parents]
    found = [path for path in found if "mark.cuda" in path.read_text() and path.name != ALONE]
    return sorted(found, key=lambda path: (path.name != "test_kernels_cuda.py", path.name))


def collect(record: Record, arguments: argparse.Namespace) -> None:
    """Every file has some; raises ValueError otherwise."""
    reports = Reports(record)
    paths = files(arguments.file)
    status = pytest.main([*FLAGS, "--collect-only", "-q", *map(str, paths)], plugins=[reports])
    empty = [path.name for path in paths if not reports.collected.get(path.name)]
    if status != pytest.ExitCode.OK or empty or not paths:
        raise ValueError(f"pytest --collect-only ended with {status!r}; files without a test for GPUs: {empty}")
    record.add("collected", **reports.collected)


def work(record: Record, arguments: argparse.Namespace) -> bool:
    """Run the tests of all files. Returns whether some ran and all passed."""
    reports, paths = Reports(record), [str(path) for path in files(arguments.file)]
    several = stage.installed("xdist") and len(paths) > 1
    processes = ["-n", str(min(PROCESSES, os.cpu_count() or 1))] if several else []
    status = pytest.main([*FLAGS, *processes, "--continue-on-collection-errors", *paths], plugins=[reports])
    record.add("ended", status=int(status), processes=processes[1:] or 1)
    return status == pytest.ExitCode.OK and reports.ran > 0


if __name__ == "__main__":
    own = stage.parser(__doc__)
    own.add_argument("--file", default="", help="one of them")
    given = own.parse_args()
    prepare_environment()
    stage.main(work, given, modules=("cupy",), check=collect if given.rehearse else lambda *_: None)
