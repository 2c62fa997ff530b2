"""How far a plan may be off, and how that is said."""

from dataclasses import replace
from html import escape

import pytest

from provisioning.plan.band import band
from provisioning.plan.choice import smallest
from provisioning.plan.scenario import Flags, scenario
from provisioning.report import render
from provisioning.report.document import document
from provisioning.report.html import html
from provisioning.report.result import answer


def question(**changes):
    asked = {"model": "qwen3-30b-a3b", "lora_rank": 32, "gpu": "hopper-96", "adapters": 300, "instances": 4}
    return scenario(Flags(slo="ttft_p95=250ms,tpot_avg=100ms", **(asked | {"batch_size": 64.0} | changes)))


def test_a_band_is_the_same_calls_with_longer_and_shorter_steps_and_outputs():
    chosen = smallest(question()).chosen
    modelled = band(chosen, simulated=False)
    busier, quieter = (question(batch_size=64.0 * factor**2) for factor in (1.2, 0.8))
    assert modelled.low == pytest.approx(busier.iar(chosen.slots), abs=1e-9)
    assert modelled.high == pytest.approx(quieter.iar(chosen.slots), abs=1e-9)
    assert modelled.low < chosen.scenario.iar(chosen.slots) < modelled.high
    enough = replace(chosen, slots=busier.min_cache_slots)
    seen = band(enough, simulated=True)
    assert (seen.low, seen.high) == pytest.approx((busier.iar(enough.slots), 1.0), abs=0.015)


def test_the_band_says_what_is_missed():
    chosen = smallest(question()).chosen
    few = replace(chosen, slots=chosen.scenario.min_cache_slots)
    tight = band(few, simulated=False)
    assert few.scenario.iar(few.slots) >= 0.95 and not tight.holds and tight.meets_tpot
    hurried = replace(few, step_us=90_000.0)
    assert not band(hurried, simulated=False).meets_tpot
    result = answer(question(), seeds=0)
    assert document(result)["band"]["admitted_at_once"] == [result.band.low, result.band.high]
    said = [row for row in render.rows(replace(result, band=tight)) if "±20 %" in row[0]]
    assert said == [("IAR, assumptions ±20 %", f"{tight.low:.4f} to {tight.high:.4f}", "+20 %: IAR missed")]
    assert document(answer(question(max_gpus=1, adapters=5000, zipf=0.5), seeds=0))["band"] is None


def test_spare_gpus_are_paid_for_and_given_to_the_coupled_side():
    without, spare = (answer(question(spare_gpus=num), seeds=0, price_per_gpu_hour=2.0) for num in (0, 1))
    assert spare.candidate.layout == without.candidate.layout
    assert spare.cost()["total_per_hour"] == without.cost()["total_per_hour"] + 2
    assert spare.cost()["engines_per_hour"] == without.cost()["engines_per_hour"]
    assert spare.coupled.gpus == without.coupled.gpus + 1
    assert "and 1 spare," in render.headline(spare) and "spare" not in render.headline(without)
    plan = document(spare)
    assert (plan["gpus"], plan["spare_gpus"]) == (without.candidate.gpus, 1)


def test_a_report_begins_with_what_was_asked_and_answered():
    result = answer(question(), seeds=0, price_per_gpu_hour=2.0, command="provision --gpu <h100>")
    page = html(result).partition("<table>")[0]
    for line in (render.question(result), render.headline(result), result.worth, *render.summary(result), result.date):
        assert escape(line) in page
    assert "provision --gpu &lt;h100&gt;" in page and "Cost per hour" in page and "may grow by x" in page
    plan = document(result)
    assert [plan[key] for key in ("question", "answer", "command", "date")] == [
        render.question(result), render.headline(result), result.command, result.date,
    ]  # fmt: skip
