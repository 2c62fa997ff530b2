"""Each bench in its smallest form ends with 0 and says what it found."""

import argparse
import importlib
import json
import os
import subprocess
import sys

import pytest

from bench import memory_soak, paper_figures, provision_setups
from lora_server.demo import children
from tests.support.sources import ROOT

BENCHES = {
    "autoscale_day": ["--day", "20", "--load", "6", "--json"],
    "classes": ["--crowd", "10", "--seconds", "1", "--rounds", "1", "--json"],
    "control_rate": ["--adapters", "3", "--engines", "2", "--seconds", "0.2", "--rounds", "1", "--json"],
    "control_scale": ["--shards", "8", "--engines", "2", "--adapters", "3", "--seconds", "0.5", "--json"],
    "failover": ["--rounds", "1", "--kills", "1", "--cuts", "1", "--json"],
    "events": ["--readers", "4", "--seconds", "1", "--stalled", "1", "--processes", "1", "--json"],
    "kernels": ["--balance", "--models", "dbrx", "--tokens", "64", "--json"],
    "kernels_cpu": ["--tokens", "2", "--rounds", "1", "--dtypes", "float32", "--json"],
    "provision_holds": ["--quick"],
    "segments": ["--rounds", "1", "--json"],
    "step_costs": ["--rounds", "2", "--json"],
    "tls": ["--rounds", "10", "--json"],
    "transport": ["--rounds", "20", "--json"],
    "cold_neighbour": ["--rounds", "1", "--remote-rounds", "0", "--json"],
    "turns": ["--rounds", "3", "--json"],
}
NOT_HERE = {"alora"}  # it needs vLLM


@pytest.mark.timeout(900)
@pytest.mark.long
@pytest.mark.parametrize("name", BENCHES)
def test_a_bench_ends_well_and_says_what_it_found(name, tmp_path):
    arguments = BENCHES[name]
    done = subprocess.run(
        children.own([sys.executable, "-m", f"bench.{name}", *arguments]),
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=850,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) if "--json" in arguments else done.stdout


def test_every_bench_can_be_imported():
    """Most need a GPU, a network or minutes."""
    for path in (ROOT / "bench").glob("*.py"):
        assert path.stem in NOT_HERE or importlib.import_module(f"bench.{path.stem}")


@pytest.mark.long
def test_the_paper_set_ups_meet_their_slos():
    for name, setup in paper_figures.systems("dbrx").items():
        found = provision_setups.measure(setup, 4.0, seeds=1)
        assert found.meets, name
        assert found.tokens_per_s == pytest.approx(4 * 211, rel=0.2)


@pytest.mark.long
def test_every_answer_is_right_with_little_memory_and_a_shard_that_is_killed():
    options = {"adapters": 60, "pool": 8, "host_pool": 6, "engines": 2, "steps": 600, "kills": 2, "seed": 3}
    found = memory_soak.measure(argparse.Namespace(**options, calm=0.0, eviction="value"))
    assert found["wrong"] == 0 and found["steps"] >= 600
    assert len(found["kills"]) == found["restarts"] == 2
    assert set(found["errors"]) <= {"step", "shard_unavailable", "server_unavailable"}, found["errors_text"]
    assert 0 < found["pool_used_mb"] <= found["pool_mb"]
    assert found["leases_left"] == found["holders_left"] == found["failed"] == 0
