"""`make race ARGS=--short`: every system answers, with the same tokens, and the files are written.

`lora-server profile-vllm`, which measures the race's engines for the planner.
"""

import json
import os
import subprocess
import sys

import pytest

from bench.race.__main__ import TINY
from bench.race.make import make
from bench.race.systems import SGLANG
from lora_server.demo import children
from provisioning.model import engine_steps
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
    of_sglang = {"SGLang", "SGLang's LoRA", "ours in SGLang"} if SGLANG.exists() else set()
    assert {row["system"].partition(",")[0] for row in rows} == {"base", "vLLM's LoRA", "ours", "PEFT", *of_sglang}
    assert all(row["failed"] == 0 for row in rows)
    compared = [row for row in rows if row["compared"]]
    assert {row["load"] for row in compared} >= {"poisson", "poisson, PEFT"}
    assert all(row["equal"] == row["compared"] for row in compared)
    (page,) = tmp_path.glob("race-cpu-*.md")
    assert "ours" in page.read_text() and page.with_suffix(".json").exists()


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_profile_of_vllm_has_the_steps_of_each_way_to_serve(tmp_path):
    make(tmp_path, TINY, {"attention": 4})
    arguments = {"dtype": "float32", "enforce_eager": True, "max_model_len": 512, "max_num_seqs": 32}
    command = [sys.executable, "-m", "lora_server", "profile-vllm", "--base-model", str(tmp_path / "base")]
    command += ["--adapters", str(tmp_path / "adapters"), "--slots", "2", "--engine-args", json.dumps(arguments)]
    command += ["--serve-args", "--layout ep1-pp1 --dtype float32", "--out", str(tmp_path / "engine.json")]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "VLLM_CPU_KVCACHE_SPACE": "1"}
    done = subprocess.run(children.own(command), env=environment, capture_output=True, text=True, timeout=1700)
    assert done.returncode == 0, done.stderr
    for kind, slots in (("base", 0), ("server", 0), ("coupled", 2)):
        steps = engine_steps.read(tmp_path / "engine.json").steps(kind, slots)
        assert [size for size, _ in steps.decode] == [1, 2, 4, 8, 16, 32] and steps.max_seqs == 32 <= steps.max_tokens
        assert len(steps.prompt) == 8 and steps.step_s(1, 0, 1) > 0
