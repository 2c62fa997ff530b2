"""What `lora-server profile-vllm` makes of an engine's times, and the race beside the simulation of its own calls."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from bench import reality
from bench.race import load
from lora_server.cli import app
from lora_server.demo import profiled_vllm, vllm_profile
from lora_server.demo.profiled_vllm import CellTimes
from lora_server.errors import ConfigError
from provisioning.model import engine_steps
from provisioning.simulation.run import SimulationResult
from provisioning.workload.requests import Requests

TRACE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 18:00:0{second}.0000000,50,20\n" for second in (0, 1)
)
NAMES = [f"attention-{number:03}" for number in range(16)]


def engine(kind, slots):
    """Time 19 ms of a step, 1 ms a request or adapter, 2 ms a prompt token, 5 ms of entry, 900 of a load."""
    _, cells = vllm_profile.cells([None] if kind == "base" else NAMES, slots)
    times = {}
    for (term, size, adapters), batches in cells.items():
        prompt = batches[0][0].prompt
        first = 19e3 + 2e3 * prompt + 5e3 + 900e3 * (term == "load")
        times[term, size, adapters] = CellTimes(first, 19e3 + 1e3 * (len(batches[0]) + adapters))
    limits = {"max_num_seqs": 32, "max_num_batched_tokens": 2048}
    return {"lora": kind, "slots": slots, "threads": 2, **limits, **vllm_profile.terms(times)}


def test_entry_and_load_are_told_from_the_steps():
    found = engine("coupled", 4)
    assert found["entry_us"] == 5e3 and found["load_us"] == 900e3
    assert found["decode"][0] == {"batch": 1, "adapters": 1, "us": 21e3}
    assert found["decode"][-1] == {"batch": 32, "adapters": 4, "us": 55e3}
    assert found["prompt"][0] == {"tokens": 1, "us": 21e3} and found["prompt"][3] == {"tokens": 64, "us": 147e3}
    assert "load_us" not in engine("server", 0)


def test_adapters_are_cold_where_a_load_is_measured_and_in_a_slot_where_a_step_is():
    first, cells = vllm_profile.cells(NAMES, 4)
    asked = [[ask.adapter for batch in cell for ask in batch] for cell in (first, *cells.values())]
    assert list(cells)[:2] == [("load", 0, 1), ("held", 0, 1)] and set(NAMES) == {*asked[0]}
    cold, held = asked[1], {*asked[2]}
    assert len(set(cold)) == len(cold) and held == set(NAMES[:4]) == {*asked[0][-4:]} and not {*cold} & held
    assert all({*names} == held for names in asked[3:]), "and the next round begins with these, too"


def test_steps_are_timed_once_all_requests_of_a_batch_have_joined():
    found = profiled_vllm.medians([[10, 40, 60, 90, 110, 130], [20, 30, 50, 70, 100, 130], [30]])
    assert found == CellTimes(first_us=20, step_us=25)


def test_a_batch_is_decoded_with_few_adapters_and_with_as_many_as_there_are():
    _, cells = vllm_profile.cells(NAMES, 0)
    numbers = [(size, adapters) for term, size, adapters in cells if term == "decode"]
    assert numbers == [(1, 1), (2, 2), (4, 4), (8, 4), (8, 8), (16, 16), (32, 4), (32, 16)]
    for (term, size, adapters), batches in cells.items():
        if term == "decode":
            assert all(len(batch) == size and len({ask.adapter for ask in batch}) == adapters for batch in batches)
            assert {NAMES[at] for at in range(4)} <= {ask.adapter for batch in batches for ask in batch}, "of all ranks"


def test_rows_of_a_race_are_predicted_from_their_own_calls(tmp_path):
    profile = tmp_path / "engine.json"
    engines = [engine("base", 0), engine("server", 0), engine("coupled", 4)]
    profile.write_text(json.dumps({"engines": engines}))
    row = {"load": "poisson", "rate": 2.0, "adapters": 16, "sites": "attention", "calls": 32, "within": 1.0}
    row |= {"ttft_p50_s": 0.1, "ttft_p95_s": 0.2, "tpot_p50_s": 0.02}
    systems = ["base", "ours", "vLLM's LoRA, 4 places, 2 threads", "vLLM's LoRA, 4 places, 1 thread", "PEFT"]
    race = {"rows": [row | {"system": system} for system in systems] + [row | {"system": "ours", "sites": "all"}]}
    steps = engine_steps.read(profile)
    found = list(reality.cells(race, steps, tmp_path))
    assert [cell.line.split(" | ")[2] for cell in found] == systems[:3]
    assert [(cell.measured, cell.predicted, cell.near) for cell in found][:2] == [(1.0, 1.0, True)] * 2
    held_up = found[2]  # by loads, and four places
    assert held_up.predicted < 1.0 and not held_up.near and not held_up.spanned and "18.8% [25, 22]" in held_up.line
    assert reality.Cell("", measured=0.9, predicted=0.7, low=0.6, high=0.86).spanned
    drawn = reality.calls_of(row, [2.0, 3.0], tmp_path)
    assert drawn == (load.poisson(load.names("attention", 16), 2.0, 16.0, 10), 16.0)
    drawn = reality.calls_of(row | {"seed": 12}, [2.0], tmp_path)
    assert drawn == (load.poisson(load.names("attention", 16), 2.0, 16.0, 12), 16.0)
    (tmp_path / load.TRACES["azure code"]).write_text(TRACE)
    with pytest.raises(ValueError, match="azure code: drew 2 calls, the race had 32"):
        list(reality.cells({"rows": [row | {"load": "azure code", "system": "ours"}]}, steps, tmp_path))


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
