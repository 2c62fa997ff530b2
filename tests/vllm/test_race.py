"""`make race ARGS=--short`: every system answers, with the same tokens, and the files are written."""

import json
import os
import subprocess
import sys

import pytest

from lora_server.demo import children
from tests.support.sources import ROOT


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_short_race_ends_well_and_all_tokens_are_equal(tmp_path):
    command = [sys.executable, "-m", "bench.race", "--short", "--json", "--out", str(tmp_path)]
    done = subprocess.run(
        children.own(command), env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=1700,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert {row["system"].partition(",")[0] for row in rows} == {"base", "vLLM's LoRA", "ours", "PEFT"}
    assert all(row["failed"] == 0 for row in rows)
    compared = [row for row in rows if row["compared"]]
    assert {row["load"] for row in compared} >= {"poisson", "poisson, PEFT"}
    assert all(row["equal"] == row["compared"] for row in compared)
    (page,) = tmp_path.glob("race-cpu-*.md")
    assert "ours" in page.read_text() and page.with_suffix(".json").exists()
