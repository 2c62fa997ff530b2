"""Engines that schedule step by step, as vLLM does, with steps as `lora-server profile-vllm` measures them, and plans
that are judged by them (`provision --engine-profile`)."""

import json
from dataclasses import replace

import numpy as np
import pytest

from lora_server import spec
from provisioning.inputs import InputError
from provisioning.model import engine_steps
from provisioning.model.engine_steps import EngineSteps
from provisioning.plan.band import band
from provisioning.plan.candidates import evaluate
from provisioning.plan.choice import smallest
from provisioning.plan.coupled import coupled, worth
from provisioning.plan.judge import judge
from provisioning.plan.stepped import stepped
from provisioning.plan.verify import no_better, system, verify
from provisioning.simulation.run import System, run
from provisioning.simulation.steps import MOST_ENGINES, StepSystem, run_steps
from provisioning.workload.requests import Lengths
from provisioning.workload.workload import Workload, zipf
from tests.support.provision import QWEN, as_json, check_refused, provision, question, requests, typed

# a step takes a second, and a tenth of one for each prompt token beyond the first
TIMES = {"decode": ((1.0, 1.0), (32.0, 1.0)), "prompt": ((1.0, 1.0), (11.0, 2.0))}
STEPS = EngineSteps(**TIMES, entry_s=0.0, load_s=5.0, max_seqs=32, max_tokens=50)
PROFILE = {
    "of": {"engine_args": {}},
    "engines": [
        {"lora": kind, "slots": slots, "entry_us": 1e3, **load, "max_num_seqs": 4, "max_num_batched_tokens": tokens,
         "decode": [{"batch": 1, "us": 2e4}], "prompt": [{"tokens": 1, "us": 2e4}, {"tokens": 65, "us": 9e4}]}
        for kind, slots, load, tokens in (
            ("server", 0, {}, 512), ("coupled", 2, {"load_us": 4e4}, 512), ("coupled", 8, {"load_us": 3e4}, 512),
            ("coupled", 99, {}, 3))
    ],
}  # fmt: skip


def calls(*rows):
    """Requests of (arrival, adapter, prompt, output tokens)."""
    arrival, adapter, prompt, tokens = (np.array(column) for column in zip(*rows, strict=True))
    return replace(requests(arrival, tokens, adapter, num_adapters=9), input_tokens=prompt)


def played(requests, *, slots=9, shared=True, load_s=0.0, **how):
    found = run_steps(requests, StepSystem(steps=replace(STEPS, **how), slots=slots, shared=shared, load_s=load_s))
    return found.first_token_s.tolist(), found.finish_s.tolist()


def test_prompts_are_computed_in_the_steps_of_those_that_decode():
    first, finish = played(calls((0, 0, 1, 4), (0.5, 1, 10, 2)))
    assert first == [1, 3] and finish == [5, 4]  # the second step takes 2 s for both


def test_a_prompt_beyond_the_budget_is_computed_in_chunks_beside_decoding():
    first, _ = played(calls((0, 0, 1, 9), (0.5, 1, 21, 1)), max_tokens=11)
    assert first[1] == pytest.approx(1 + 2.0 + 2.0 + 1.1)  # 10, 10 and 1 tokens, each beside a decoding request


def test_coupled_requests_of_adapters_without_a_slot_are_overtaken():
    rows = calls((0, 0, 1, 3), (0.1, 1, 1, 2), (0.2, 0, 1, 1))
    first, finish = played(rows, slots=1, shared=False, load_s=0.0)
    assert first == pytest.approx([6, 14.1, 7.1])  # 5 s of load; the third shares the slot, the second loads after both
    assert finish[0] == pytest.approx(8.1)


def test_a_server_loads_beside_the_steps():
    first, finish = played(calls((0, 0, 1, 9), (0.5, 1, 1, 1)), load_s=3.0)
    assert first == pytest.approx([4, 5.1])  # its load ends at 3.5, and it joins the step at 4
    assert finish[0] == pytest.approx(12.1)
    first, _ = played(calls((0, 0, 1, 2), (0.5, 1, 1, 1)), slots=1, load_s=3.0)
    assert first == [4, 5 + 3 + 1]  # it waits for the slot, then for its load


def test_no_more_requests_run_than_the_engine_has_places():
    first, _ = played(calls(*[(0, 0, 1, 2)] * 3), max_seqs=2)
    assert first == pytest.approx([1.1, 1.1, 3.1])


def both(*, shared, load_s=0.0, prompt=1, rate=0.2):
    """TTFT step by step, and by the clock of `run`, beyond a request's own prompt."""
    workload = Workload(popularity=zipf(0.8, 40), lengths=Lengths(mean_tokens=20))
    requests = workload.sample(rate=rate, num_requests=3000, seed=7)
    requests = replace(requests, input_tokens=np.full(3000, prompt))
    own_s = STEPS.step_s(1, prompt, 1) - 1
    steps = StepSystem(steps=replace(STEPS, load_s=load_s, max_tokens=5000), slots=8, shared=shared, load_s=load_s)
    system = System(step_s=[1.0], cache_slots=8, shared=shared, max_batch=32, load_s=load_s, prompt_s=own_s)
    return run_steps(requests, steps).ttft_s - own_s, run(requests, system).ttft_s


@pytest.mark.parametrize("prompt", [1, 11])
@pytest.mark.parametrize("shared", [True, False])
def test_where_vllm_schedules_as_plans_assume_both_simulations_agree(shared, prompt):
    exact, clocked = both(shared=shared, prompt=prompt)
    assert np.isfinite(exact).all()
    assert (exact <= 5).mean() == pytest.approx((clocked <= 5).mean(), abs=0.03)


def test_a_load_within_a_step_costs_coupled_engines_what_plans_do_not_charge_them():
    exact, clocked = both(shared=False, load_s=2.0, prompt=11)
    assert (exact <= 5).mean() < (clocked <= 5).mean() - 0.2
    exact, clocked = both(shared=True, load_s=2.0)
    assert (exact <= 5).mean() == pytest.approx((clocked <= 5).mean(), abs=0.06)


def test_the_nearest_number_of_slots_is_read(tmp_path):
    file = tmp_path / "engine.json"
    file.write_text(json.dumps(PROFILE))
    found = engine_steps.read(file).steps("coupled", 6)
    assert found.load_s == pytest.approx(0.03) and found.max_seqs == 4
    assert found.step_s(1, 0, 1) == pytest.approx(0.02) and found.step_s(1, 32, 1) == pytest.approx(0.055)
    assert found.step_s(0, 129, 1) == pytest.approx(0.16)
    all_held = engine_steps.read(file).steps("coupled", 99)
    assert all_held.load_s == found.load_s, "with a slot for each adapter none is measured"
    assert (found.max_tokens, all_held.max_tokens) == (512, 3)
    with pytest.raises(InputError, match=r"--engine-profile: .*no engine with lora 'base'"):
        engine_steps.read(file).steps("base", 0)
    for broken in (
        {"engines": 3},
        {"engines": [{"lora": "coupled"}]},
        {"engines": [PROFILE["engines"][3]]},
        {"engines": [{name: value for name, value in PROFILE["engines"][2].items() if name != "max_num_seqs"}]},
    ):
        file.write_text(json.dumps(broken))
        with pytest.raises(InputError, match=r"--engine-profile: .*engine\.json.*expected"):
            engine_steps.read(file).steps("coupled", 0)


def test_fewer_adapters_and_prompts_beside_a_batch_take_what_was_measured(tmp_path):
    decode = [(1, 1, 20), (8, 4, 40), (8, 8, 48), (32, 4, 60), (32, 32, 144)]
    rows = [{"batch": batch, "adapters": adapters, "us": ms * 1e3} for batch, adapters, ms in decode]
    prompt = [{"tokens": tokens, "us": ms * 1e3} for tokens, ms in ((1, 20), (8, 21), (16, 22), (32, 54))]
    file, engine = tmp_path / "engine.json", PROFILE["engines"][0] | {"decode": rows, "prompt": prompt}
    file.write_text(json.dumps({"engines": [engine]}))
    found = engine_steps.read(file).steps("server", 0)
    assert found.step_s(8, 0, 8) == pytest.approx(0.048) and found.step_s(8, 0, 5) == pytest.approx(0.042)
    assert found.step_s(32, 0, 12) == pytest.approx(0.084) and found.step_s(1, 0, 1) == pytest.approx(0.02)
    assert found.step_s(8, 8, 8) == pytest.approx(0.049), "8 rows more cost less than the steep rest of the curve"
    assert found.step_s(8, 24, 8) == pytest.approx(0.081)
    file.write_text(json.dumps({"engines": [engine | {"decode": [*rows, rows[0]]}]}))
    with pytest.raises(InputError, match=r"--engine-profile: .*expected one row or more, each of another size"):
        engine_steps.read(file).steps("server", 0)


def test_what_few_adapters_save_leaves_a_step_the_time_of_one_request_of_each():
    how = {"decode": ((16.0, 0.05), (32.0, 0.06)), "adapter": ((8.0, 0.001), (32.0, 0.002)), "most_adapters": 32}
    steps = replace(STEPS, **how)
    assert steps.step_s(32, 0, 1) == pytest.approx(0.05), "not 0.06 - 31 * 0.002"
    assert steps.step_s(256, 0, 1) == pytest.approx(0.2 - 31 * 0.002), "no saving grows beyond the largest batch"


def test_a_step_is_charged_for_the_adapters_of_its_batch():
    how = {"decode": ((1.0, 1.0), (32.0, 32.0)), "adapter": ((2.0, 0.5),), "most_adapters": 32}
    for second, step_s in ((0, 1.5), (1, 2.0)):
        first, finish = played(calls((0, 0, 1, 3), (0, second, 1, 3)), **how)
        assert finish[0] - first[0] == pytest.approx(2 * step_s)


def test_adapters_that_were_read_before_are_in_the_slots():
    rows = calls((0, 0, 1, 1), (10, 1, 1, 1))
    for shared, visible in ((False, STEPS.load_s), (True, 3.0)):
        system = StepSystem(steps=STEPS, slots=1, shared=shared, load_s=3.0)
        cold = run_steps(rows, system).ttft_s
        warm = run_steps(rows, replace(system, read=(1, 0))).ttft_s
        assert (cold - warm).tolist() == pytest.approx([visible, 0.0])


def test_simulate_takes_measured_steps(tmp_path):
    (tmp_path / "engine.json").write_text(json.dumps(PROFILE))
    asked = ["simulate", "--engine-profile", str(tmp_path / "engine.json"), "--cache-slots", "2", "--adapters", "9"]
    asked += ["--request-rate", "1", "--mean-output-tokens", "10", "--prompt-tokens", "33", "--requests", "300"]
    for mode, least in (("disaggregated", 0.056), ("coupled", 0.056)):
        found = as_json(*asked, "--mode", mode)["simulated"]
        assert found["ttft_p50_s"]["mean"] >= least and found["tpot_p50_s"]["mean"] >= 0.02
    check_refused(provision(*asked, "--order", "sjf"), "--order: got 'sjf' with --engine-profile")


# -- plans that are judged by measured steps

SLO = "ttft_p95=500ms,tpot_avg=50ms"
FEW = QWEN | {"slo": SLO, "adapters": 60, "zipf": 1.0, "mean_output_tokens": 8.0, "prompt_tokens": 16.0}
ASKED = FEW | {"instances": 2, "batch_size": None, "request_rate": 60.0}


def profiled(tmp_path, step_ms=20.0, *, token_ms=0.5, load_ms=1.0, kinds=("server", "coupled"), **of):
    """Write a profile whose steps take `step_ms`, and `token_ms` more for each prompt token."""
    decode = [{"batch": 1, "adapters": 1, "us": step_ms * 1e3}, {"batch": 32, "adapters": 32, "us": step_ms * 1e3}]
    prompt = [{"tokens": tokens, "us": (step_ms + token_ms * tokens) * 1e3} for tokens in (1, 1000)]
    limits = {"max_num_seqs": 64, "max_num_batched_tokens": 512, "entry_us": 0.0, "load_us": load_ms * 1e3}
    engines = [{"lora": kind, "slots": 4, **limits, "decode": decode, "prompt": prompt} for kind in kinds]
    file = tmp_path / "engine.json"
    known = {"model": spec.PRESETS[QWEN["model"]].geometry, "lora_ranks": [8, 64]} | of
    file.write_text(json.dumps({"source": "made", "of": known, "engines": engines}))
    return file


def judged(tmp_path, **how):
    asked = question(**ASKED, engine_profile=profiled(tmp_path, **how))
    plan = smallest(asked).chosen
    return judge(plan.scenario, system(plan), plan.mean_step_us, 2)


def test_a_verdict_follows_the_measured_steps(tmp_path):
    quick = judged(tmp_path)
    assert quick.holds and quick.within_ttft.mean > 0.99
    assert quick.tpot_s.mean == pytest.approx(0.02 + 60 / 2 * 0.02 * 16 * 0.5e-3, rel=0.15)  # prompts beside it
    slow = judged(tmp_path, step_ms=60)
    assert slow.in_time and not slow.meets_tpot and not slow.holds, "though all are in time"


def test_a_plan_is_refuted_by_steps_that_the_model_does_not_know(tmp_path):
    asked = question(**ASKED, engine_profile=profiled(tmp_path, step_ms=60), max_gpus=2)
    model = smallest(asked)
    assert model.chosen is not None
    found = verify(asked, model, 5)
    assert not found.choice.feasible and found.choice.binding == "tpot" and not found.verdict.meets_tpot
    by_model = replace(model.chosen, mean_step_us=model.chosen.mean_step_us * 0.9)
    clocked = replace(by_model, scenario=replace(by_model.scenario, engine_profile=None))
    assert no_better(by_model, model.chosen) and not no_better(clocked, model.chosen), "the measured steps are the same"


def test_coupled_engines_and_the_band_take_measured_steps_too(tmp_path):
    asked = question(**ASKED, engine_profile=profiled(tmp_path, step_ms=45, load_ms=0.001))
    found = coupled(asked, 3, 2)
    plan = smallest(asked).chosen
    assert found.verdict.tpot_s.mean > 0.045
    near = band(plan, simulated=True)
    assert near.high > 0.99 and not near.holds, "steps of 54 ms exceed the SLO"
    slow = question(**ASKED, engine_profile=profiled(tmp_path, step_ms=60))
    assert "miss the TPOT SLO" in worth(evaluate(slow, plan.layout), coupled(slow, 3, 2))


def test_prompts_are_the_questions_and_one_token_where_others_compute_them(tmp_path):
    for prefill, is_in_time in (("shared", False), ("apart", True)):  # 160 ms of a prompt, or 10
        asked = question(**ASKED, engine_profile=profiled(tmp_path, token_ms=10), prefill=prefill)
        plan = smallest(asked).chosen
        assert judge(plan.scenario, system(plan), plan.mean_step_us, 2, give_up=True).in_time is is_in_time


def test_what_does_not_fit_the_profile_is_refused(tmp_path):
    file = profiled(tmp_path)
    refused = {
        "--dispatch": {"dispatch": "by-adapter"},
        "--coupled-split": {"coupled_split": "paper"},
        "--batch-size": {"batch_size": 8.0, "request_rate": None},
        "--engine-profile: .*measured with LoRA ranks": {"lora_rank": 128},
        "--engine-profile: .*measured with model": {"model": "mixtral-8x7b"},
        "--engine-profile: .*cannot be read": {"engine_profile": tmp_path / "absent.json"},
    }
    for says, flags in refused.items():
        with pytest.raises(InputError, match=says):
            question(**(ASKED | {"engine_profile": file} | flags))
    profile = question(**ASKED, engine_profile=file).engine_profile
    with pytest.raises(InputError, match=f"--engine-profile: .*at most {MOST_ENGINES}"):
        stepped(profile, "server", slots=4, instances=MOST_ENGINES + 1, most_requests=9)
    alone = question(**ASKED, engine_profile=profiled(tmp_path, kinds=("server",)))
    with pytest.raises(InputError, match=r"no engine with lora 'coupled'.*--slots"):
        coupled(alone, 3, 2)
    asked = typed(**{name: ASKED[name] for name in ("slo", "model", "lora_rank", "gpu", "adapters", "request_rate")})
    check_refused(provision("compare", *asked, "--engine-profile", file), "--engine-profile")


def test_a_plan_says_what_its_ttft_and_tpot_are(tmp_path):
    asked = typed(**{name: value for name, value in ASKED.items() if value is not None})
    said = as_json(*asked, "--engine-profile", profiled(tmp_path))
    assert said["simulation"]["tpot_s"]["mean"] > 0.02 and said["coupled"]["simulation"]["tpot_s"]["mean"] > 0.02
    assert said["provenance"]["engine_step_us"] == {
        "value": pytest.approx(2e4), "unit": "us", "kind": "measured",
        "source": "engine.json: made; of one request, as vLLM schedules",
    }  # fmt: skip
    slow = provision(*asked, "--engine-profile", profiled(tmp_path, step_ms=60), "--max-gpus", 1)
    assert slow.exit_code == 3 and "within the TTFT SLO 1.0000, TPOT" in slow.output.replace("\n", " ")
    assert "TTFT includes the prompt" in said["notes"][0] and np.isfinite(said["simulation"]["interval"]).all()
