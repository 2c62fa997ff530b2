"""What `lora-server profile-vllm` makes of an engine's times, and the race beside the simulation of its own calls."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from bench import reality
from bench.race import load
from lora_server.cli import app
from lora_server.demo import vllm_profile
from lora_server.demo.profiled_vllm import CellTimes
from lora_server.errors import ConfigError
from provisioning.simulation.run import SimulationResult
from provisioning.workload.requests import Requests

TRACE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 18:00:0{second}.0000000,50,20\n" for second in (0, 1)
)
NAMES = [f"attention-{number:03}" for number in range(16)]


def engine(kind, slots):
    """An engine with 20 ms of a step, 1 ms a request, 2 ms a prompt token, 5 ms of entry, 900 of a load."""
    cells = vllm_profile.cells([None] if kind == "base" else NAMES, slots)
    times = {}
    for (term, size), batches in cells.items():
        prompt = batches[0][0].prompt
        first = 18e3 + 2e3 * prompt + 5e3 + 900e3 * (term == "load")
        times[term, size] = CellTimes(first, 19e3 + 1e3 * len(batches[0]))
    limits = {"max_num_seqs": 32, "max_num_batched_tokens": 2048}
    return {"lora": kind, "slots": slots, "threads": 2, **limits, **vllm_profile.terms(times)}


def test_entry_and_load_are_told_from_the_steps():
    found = engine("coupled", 4)
    assert found["entry_us"] == 5e3 and found["load_us"] == 900e3
    assert found["decode"][0] == {"batch": 1, "us": 20e3} and found["decode"][-1] == {"batch": 32, "us": 51e3}
    assert found["prompt"][0] == {"tokens": 1, "us": 20e3} and found["prompt"][2] == {"tokens": 64, "us": 146e3}
    assert "load_us" not in engine("server", 0)


def test_adapters_are_cold_where_a_load_is_measured_and_in_a_slot_where_a_step_is():
    cells = vllm_profile.cells(NAMES, 4)
    before = [ask.adapter for batch in cells["warm", 0] for ask in batch][-4:]
    cold = [ask.adapter for batch in cells["load", 0] for ask in batch]
    assert len(set(cold)) == len(cold) and not {*cold} & {*before}
    timed = {
        ask.adapter for (term, _), cell in cells.items() if term in ("decode", "prompt") for one in cell for ask in one
    }
    assert timed == set(NAMES[:4]) == {ask.adapter for batch in cells["held", 0] for ask in batch}


def test_rows_of_a_race_are_predicted_from_their_own_calls(tmp_path):
    profile = tmp_path / "engine.json"
    engines = [engine("base", 0), engine("server", 0), engine("coupled", 4)]
    profile.write_text(json.dumps({"engines": engines}))
    row = {"load": "poisson", "rate": 2.0, "adapters": 16, "sites": "attention", "calls": 32, "within": 1.0}
    row |= {"ttft_p50_s": 0.1, "ttft_p95_s": 0.2, "tpot_p50_s": 0.02}
    systems = ["base", "ours", "vLLM's LoRA, 4 places, 2 threads", "vLLM's LoRA, 4 places, 1 thread", "PEFT"]
    race = {"rows": [row | {"system": system} for system in systems] + [row | {"system": "ours", "sites": "all"}]}
    found = list(reality.lines(race, profile, tmp_path))
    assert [line.split(" | ")[2] for line, _, _ in found] == systems[:3]
    assert all(measured == 1.0 for _, measured, _ in found) and [said for *_, said in found][:2] == [1.0, 1.0]
    assert found[2][2] < 1.0, "loads and four places hold its requests up"
    drawn = reality.calls_of(row, [2.0, 3.0], tmp_path)
    assert drawn == (load.poisson(load.names("attention", 16), 2.0, 16.0, 10), 16.0)
    drawn = reality.calls_of(row | {"seed": 12}, [2.0], tmp_path)
    assert drawn == (load.poisson(load.names("attention", 16), 2.0, 16.0, 12), 16.0)
    (tmp_path / load.TRACES["azure code"]).write_text(TRACE)
    with pytest.raises(ValueError, match="azure code: drew 2 calls, the race had 32"):
        list(reality.lines({"rows": [row | {"load": "azure code", "system": "ours"}]}, profile, tmp_path))


def test_a_result_that_cannot_be_written_is_refused_before_the_measurement(tmp_path):
    typed = ["profile-vllm", "--base-model", str(tmp_path), "--adapters", str(tmp_path), "--out", str(tmp_path)]
    refused = CliRunner().invoke(app, typed)
    assert refused.exit_code != 0 and f"--out: {tmp_path} cannot be written" in refused.stderr, refused.output


def test_loads_are_measured_of_fewer_slots_than_adapters(tmp_path):
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "adapter_config.json").write_text('{"r": 8}')
    plan = {"base_model": tmp_path, "adapters": tmp_path, "threads": 1, "engine_args": {}, "serve_args": ()}
    with pytest.raises(ConfigError, match="--slots: expected fewer than the 1 adapters"):
        vllm_profile.measure(vllm_profile.EnginePlan(**plan, slots=(1, 4)), "", print)


def test_a_call_that_ends_after_the_job_counts_as_outside():
    calls, seconds = load.poisson(["a"], 1.0, 1.0, 1), 1.0
    arrival_s = np.array([calls[0].at])
    one = Requests(arrival_s=arrival_s, adapter=np.zeros(1, int), output_tokens=np.ones(1, int), num_adapters=1)
    first_s, finish_s = np.array([1.0]), np.array([1.7])  # the job ends at 1.6
    said = reality.scored(calls, seconds, SimulationResult(one, arrival_s, first_s, finish_s, np.ones(1, bool)))
    assert said["complete"] == 0 and said["within"] == 0 and said["ttft_p50_s"] == pytest.approx(1.0 - calls[0].at)
