"""Plans that are judged step by step, by the engines' measured steps (`provision --engine-profile`)."""

import json
from dataclasses import replace

import numpy as np
import pytest

from lora_server import spec
from provisioning.inputs import InputError
from provisioning.plan.band import band
from provisioning.plan.candidates import evaluate
from provisioning.plan.choice import smallest
from provisioning.plan.coupled import coupled, worth
from provisioning.plan.judge import judge
from provisioning.plan.stepped import stepped
from provisioning.plan.verify import no_better, system, verify
from provisioning.simulation.steps import MOST_ENGINES
from tests.support.provision import QWEN, check_refused, provision, question, typed

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
    found = provision(*asked, "--engine-profile", profiled(tmp_path), "--json")
    assert found.exit_code == 0, found.output
    said = json.loads(found.stdout)
    assert said["simulation"]["tpot_s"]["mean"] > 0.02 and said["coupled"]["simulation"]["tpot_s"]["mean"] > 0.02
    assert said["provenance"]["engine_step_us"] == {
        "value": pytest.approx(2e4), "unit": "us", "kind": "measured",
        "source": "engine.json: made; of one request, as vLLM schedules",
    }  # fmt: skip
    slow = provision(*asked, "--engine-profile", profiled(tmp_path, step_ms=60), "--max-gpus", 1)
    assert slow.exit_code == 3 and "within the TTFT SLO 1.0000, TPOT" in slow.output.replace("\n", " ")
    assert "TTFT includes the prompt" in said["notes"][0] and np.isfinite(said["simulation"]["interval"]).all()
