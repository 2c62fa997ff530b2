"""The plan: its keys, the smallest that holds, what its simulation refutes, how far it may be off, its files."""

import json
import re
import time
from collections import Counter
from dataclasses import replace
from html import escape

import pytest
import yaml
from matplotlib.figure import Figure

from lora_server import spec
from lora_server.config import load as config_of
from lora_server.placement import Layout
from lora_server.slo import Slo
from lora_server.units import Size
from provisioning.inputs import InputError
from provisioning.model import memory
from provisioning.plan.band import band
from provisioning.plan.candidates import evaluate
from provisioning.plan.choice import smallest
from provisioning.plan.coupled import coupled, worth
from provisioning.plan.instances import sized
from provisioning.plan.judge import judge, played
from provisioning.plan.sensitivity import headroom
from provisioning.plan.verify import disaggregated, verify
from provisioning.report import charts, render
from provisioning.report.document import document
from provisioning.report.html import html
from provisioning.report.result import answer
from provisioning.report.serve_file import settings
from tests.support.provision import ASKED, DECODING, QWEN, SLO, as_json, provision, question, typed

OTHERS = [("gpt-oss-20b", 64), ("qwen3-30b-a3b", 32), ("scaled-moe", 64), ("dbrx", 64)]
TABLE_3 = [("mixtral-8x7b", 64), *(pytest.param(*one, marks=pytest.mark.long) for one in OTHERS)]
RATE = {"instances": None, "batch_size": None} | DECODING
KEYS = {
    "feasible", "gpus", "layout", "min_cache_slots", "cache_slots", "iar", "iar_target", "binding_constraint",
    "latency_us", "coupled", "sensitivity", "simulation", "provenance",
}  # fmt: skip


@pytest.mark.parametrize(("model", "rank"), TABLE_3)
def test_every_table_3_model_has_a_plan_that_its_simulation_bears_out(model, rank):
    start = time.process_time()
    plan = as_json(*ASKED, *typed(model=model, lora_rank=rank, **DECODING))
    assert time.process_time() - start < 48  # the bar is 12 s on an idle machine
    assert set(plan) >= KEYS
    assert plan["feasible"] and plan["gpus"] == plan["layout"]["ep"] * plan["layout"]["pp"]
    assert plan["cache_slots"] >= plan["min_cache_slots"]
    assert plan["iar"] >= plan["iar_target"] == 0.95
    latency = plan["latency_us"]
    assert latency["recv"] + latency["compute"] + latency["send"] == pytest.approx(latency["total"])
    assert latency["total"] <= latency["budget"]
    simulation = plan["simulation"]
    assert simulation["seeds"] >= 5 and simulation["holds_target"]
    assert simulation["share_within_ttft_slo"]["interval"][0] >= 0.95
    assert simulation["refuted"] == [] and not simulation["below_model"]
    if plan["gpus"] > 1:
        assert simulation["refuted_below"][0]["gpus"] == plan["gpus"] - 1
    assert plan["coupled"]["verdict"] and plan["sensitivity"]
    assert {entry["kind"] for entry in plan["provenance"].values()} <= {"measured", "extrapolated", "assumed"}
    assert json.dumps(plan, allow_nan=False), "every number is finite"


def test_one_gpu_fewer_does_not_do():
    chosen = smallest(question(model="dbrx")).chosen
    assert chosen is not None and chosen.gpus > 1
    assert smallest(replace(question(model="dbrx"), max_gpus=chosen.gpus - 1)).chosen is None


def test_an_exact_tie_of_layouts_goes_to_the_faster():
    chosen = smallest(question(gpu="a100-80")).chosen
    assert chosen is not None
    others = [Layout(ep, chosen.gpus // ep) for ep in (1, 2, 4, 8) if chosen.gpus % ep == 0]
    model = question(gpu="a100-80").model
    assert chosen.latency.total <= min(model.lora(64, layout).total for layout in others) + 1e-9


@pytest.mark.parametrize(("changes", "binding", "helps"), [
    ({"max_gpus": 1}, "cache", "max GPUs 2"),
    ({"slo": "ttft_p95=15ms,tpot_avg=100ms"} | DECODING, "ttft", "TTFT SLO 30 ms"),
    ({"slo": "ttft_p95=250ms,tpot_avg=10ms"} | DECODING, "tpot", "TPOT SLO 20 ms"),
    ({"link_gbps": 1.0}, "network", ""),
    ({"link_gbps": 60.0, "batch_size": 128.0}, "network", "prompts computed apart"),
    ({"transport": "gpu"}, "host", ""),
    ({"lora_rank": 4096, "adapters": 4, "batch_size": 256.0, "slo": "ttft_p95=9s,tpot_avg=25ms"} | DECODING,
     "compute", ""),
])  # fmt: skip
def test_infeasible_names_what_binds_and_what_would_help(changes, binding, helps):
    if not helps:
        assert smallest(question(**changes)).binding == binding
        return
    result = answer(question(**changes), seeds=0)
    plan = document(result)
    assert not result.feasible and plan["binding_constraint"] == binding
    rows = {row["change"]: row for row in plan["sensitivity"]}
    assert rows[helps]["gpus"], helps
    assert rows["gpus +1"]["gpus"] == plan["closest"]["gpus"] + 1
    assert plan["coupled"]["evaluated"] and plan["coupled"]["verdict"]
    assert json.dumps(plan, allow_nan=False), "every number is finite"


def test_a_load_beyond_one_server_is_planned_on_several():
    asked = typed(slo=SLO, model="gpt-oss-20b", adapters=512, request_rate=10_000, **DECODING)
    plan = json.loads(provision(*asked, "--no-simulate", "--json").stdout)
    found = plan["sensitivity"][-1]
    assert not plan["feasible"] and found["change"] == "3 servers, each with its share of the load"
    assert f"By the model {found['change']} do: {found['gpus']} GPUs as {found['layout']}" in plan["answer"]
    each = smallest(sized(question(model="gpt-oss-20b", request_rate=10_000 / 3, **RATE))).chosen
    assert (each.gpus, each.scenario.instances) == (found["gpus"], found["instances"])


def test_attention_is_no_figure_of_the_papers_table():
    found = document(answer(question(), seeds=0))["provenance"]
    assert found["base_attention_us"]["kind"] == "assumed" and "fitted" not in found["base_attention_us"]["source"]
    assert found["base_ffn_us"]["source"] == "fitted to batch 128 of the paper's Table 4"


TIGHT = {"gpu": "h100", "adapters": 200, "context_tokens": 8192.0} | DECODING  # KV of 59 requests an instance


def test_the_engines_hold_the_kv_of_what_they_serve():
    refused = answer(question(**TIGHT, batch_size=120.0), seeds=0)
    assert refused.candidate.failed == ("kv",) and refused.candidate.gpus <= 8
    assert document(refused)["load"]["batch_limit_by_kv"] == 59
    helps = {item.change: item.gpus for item in refused.variants}
    assert helps["instances 8, the load spread over them"] is None and helps["memory per GPU x2"]
    assert smallest(question(**TIGHT, batch_size=30.0)).feasible


@pytest.mark.long
def test_a_simulated_load_that_is_now_and_then_over_the_kv_is_refuted():
    full = answer(question(**TIGHT, batch_size=58.0), seeds=5)
    assert not full.feasible and full.verified.choice.binding == "kv"


def test_infeasible_is_exit_3_with_json_and_emits_nothing(tmp_path):
    outcome = provision(*ASKED, "--max-gpus", "1", "--json", "--no-simulate", "--emit", tmp_path / "out")
    assert outcome.exit_code == 3
    plan = json.loads(outcome.stdout)
    assert not plan["feasible"] and plan["binding_constraint"] == "cache" and plan["gpus"] is None
    assert set(plan) >= KEYS
    assert "not written" in outcome.stderr and not (tmp_path / "out").exists()


def test_percentile_sets_the_target_unless_iar_is_given():
    assert question(slo=" tpot_avg = 0.1s , ttft_p99.9=2.5e5us").slo == Slo(250_000, 99.9, 100_000)
    assert question(slo="ttft_p99=250ms,tpot_avg=100ms").iar_target == 0.99
    assert question(iar=0.9).iar_target == 0.9
    assert question(iar=0.9).cache.min_cache_slots < question().cache.min_cache_slots


def test_whole_nodes_and_spare_gpus():
    choice = smallest(question(whole_nodes=True))
    assert choice.chosen is not None and choice.chosen.gpus == 8
    assert choice.binding == "node_granularity"
    plain = question(max_gpus=16, whole_nodes=True)
    assert list(plain.gpu_counts) == [8, 16] and list(replace(plain, spare_gpus=1).gpu_counts) == [7, 15]
    assert list(replace(plain, whole_nodes=False, spare_gpus=14).gpu_counts) == [1, 2]
    with pytest.raises(InputError, match=r"--spare-gpus: got 16, expected a whole number in \[0, 15\]"):
        question(max_gpus=16, spare_gpus=16)
    without, spare = (answer(question(spare_gpus=num), seeds=0, price_per_gpu_hour=2.0) for num in (0, 1))
    cost = without.cost()
    assert cost["lora_server_per_hour"] == 2.0 * without.candidate.gpus
    assert cost["total_per_month"] == pytest.approx(cost["total_per_hour"] * 730)
    assert spare.candidate.layout == without.candidate.layout
    assert spare.cost()["total_per_hour"] == cost["total_per_hour"] + 2
    assert spare.cost()["engines_per_hour"] == cost["engines_per_hour"]
    assert spare.coupled.gpus == without.coupled.gpus + 1
    assert "and 1 spare," in render.headline(spare) and "spare" not in render.headline(without)
    plan = document(spare)
    assert (plan["gpus"], plan["spare_gpus"]) == (without.candidate.gpus, 1)


def test_replicas_are_spares_on_nodes_of_their_own():
    plain = question(max_gpus=16, whole_nodes=True, transport="tcp")
    assert plain.gpu_counts == [8, 16] and replace(plain, replicas=2).gpu_counts == [4, 8]
    assert replace(plain, whole_nodes=False, replicas=3, spare_gpus=2).gpu_counts == [1, 2, 3, 4]
    one, two = (answer(replace(question(), replicas=num), seeds=0, price_per_gpu_hour=2.0) for num in (1, 2))
    gpus = one.candidate.gpus
    assert two.candidate.layout == one.candidate.layout and two.candidate.spare_gpus == gpus
    assert two.cost()["lora_server_per_hour"] == 2 * one.cost()["lora_server_per_hour"]
    assert (one.nodes, two.nodes, settings(two)["nodes"], settings(two)["replicas"]) == (1, 2, 2, 2)
    assert f"and {gpus:,} spare (2 replicas)," in render.headline(two) and "replicas" not in settings(one)
    with pytest.raises(InputError, match=r"--replicas: got 2 with --transport nvshmem, expected .* shm or tcp"):
        question(replicas=2)


@pytest.mark.long
def test_a_refuted_plan_gets_more_gpus_and_says_so():
    asked = question(burst_cv=5.0, adapters=2000, zipf=0.6, model="qwen3-30b-a3b")
    first = smallest(asked)
    verified = verify(asked, first, 5)
    assert verified.refuted, "bursts of this size should refute a Poisson model"
    assert verified.refuted[0].candidate.gpus == first.chosen.gpus
    if verified.choice.chosen is not None:
        assert verified.choice.chosen.gpus > first.chosen.gpus
        assert verified.verdict.within_ttft.low >= 0.95
        assert verified.choice.binding == "simulation"


HOT = [*ASKED, *typed(adapters=100, zipf=1.6, batch_size=250, gpu_memory_gib=106, **DECODING)]


@pytest.mark.long
def test_the_simulation_goes_below_a_model_that_is_too_pessimistic():
    """`offered` asks for two GPUs here, 62 slots; the 57 of one hold."""
    plan = as_json(*HOT)
    simulation = plan["simulation"]
    assert plan["gpus"] == 1 and plan["cache_slots"] < plan["min_cache_slots"] and plan["iar"] < 0.95
    assert simulation["share_within_ttft_slo"]["interval"][0] >= 0.95
    assert simulation["below_model"] and simulation["refuted"] == []
    assert simulation["model_gpus"] == 2 and simulation["gpus_saved"] == 1 and simulation["gpus_added"] == 0
    assert plan["binding_constraint"] == "cache" and plan["load_headroom"] is None


@pytest.mark.long
@pytest.mark.parametrize("changes", [{"iar": 1.0}, {"slo": "ttft_p100=250ms,tpot_avg=100ms"}], ids=str)
def test_no_run_proves_that_no_request_ever_waits(changes):
    """30,000 calls without a miss are no proof of an IAR of 1, for which all adapters must fit."""
    asked = question(adapters=180, **changes, **DECODING)
    first = smallest(asked)
    verified = verify(asked, first, 5)
    assert verified.choice.chosen is first.chosen and first.chosen.slots >= 180
    fewer = replace(asked, max_gpus=first.chosen.gpus - 1)
    assert verify(fewer, smallest(fewer), 5).choice.chosen is None


@pytest.mark.long
@pytest.mark.parametrize(("asked", "says"), [
    # with one GPU at most the model has no plan for the same question
    ([*HOT, "--max-gpus", "1"], ["The model has no plan", "in the simulation the target holds with 1 GPU"]),
    (ASKED, ["Fewer slots do not suffice: the simulation refuted 1 GPU (ep1-pp1, 76 slots"]),
], ids=["below the model", "refuted"])  # fmt: skip
def test_a_plan_says_what_its_simulation_found(asked, says):
    outcome = provision(*asked)
    assert outcome.exit_code == 0, outcome.output
    assert all(said in " ".join(outcome.stdout.split()) for said in says)


def test_coupled_verdict_goes_both_ways():
    roomy = document(answer(question(), seeds=0))["coupled"]
    assert not roomy["lora_server_worth_it"] and "not worth it" in roomy["verdict"]
    asked = question(gpu="h100", model="gpt-oss-20b", adapters=1000, batch_size=128.0, **DECODING)
    tight = document(answer(asked, seeds=0))["coupled"]
    assert tight["lora_server_worth_it"] and tight["gpus_needed"] > tight["gpus"]


def test_coupled_instances_are_judged_behind_a_router_that_knows_their_caches():
    """Half of the load is one adapter's: alone in an instance of eight it is over its room for KV."""
    flags = {"adapters": 200, "zipf": 1.6, "instances": 8, "batch_size": 80.0, "context_tokens": 4096.0}
    asked, assigned = (question(gpu="hopper-96", coupled_split=split, **flags) for split in ("0.5", "paper"))
    found, paper = coupled(asked, 8), coupled(assigned, 8)
    assert found.copies == 4 and not paper.copies and found.split.slots == paper.split.slots
    assert found.split.admitted > 1.5 * paper.split.admitted
    asked = question(model="gpt-oss-20b", gpu="h100", **DECODING)
    routed, assigned = (coupled(one, 6, 2).verdict for one in (asked, replace(asked, coupled_routed=False)))
    assert routed.holds and not assigned.holds and assigned.within_ttft.mean < 0.97 < routed.within_ttft.mean


def test_verdicts_follow_the_slo_that_was_asked():
    """Most requests wait: within 30 s they are in time, within 250 ms they are not, and --iar forbids it."""
    few = {"adapters": 300, "zipf": 0.8, "instances": 2, "batch_size": 32.0} | DECODING
    slow = {"slo": "ttft_p95=30s,tpot_avg=100ms"}
    asked, hasty, strict = (question(**few, **more) for more in (slow, {}, slow | {"iar": 0.95}))
    system = disaggregated(replace(evaluate(asked, Layout(1, 1)), slots=40))
    step_us = evaluate(asked, Layout(1, 1)).mean_step_us
    patient, late, at_once = (judge(one, system, step_us, 2) for one in (asked, hasty, strict))
    assert patient.immediate.mean < 0.5 and patient.within_ttft.mean > 0.99
    assert (patient.holds, late.holds, at_once.holds) == (True, False, False)
    assert late.in_time is False and at_once.in_time is True
    span_s = played(asked, step_us, 0).span_s
    assert span_s > 10 * 30, "a wait that grows would be seen"
    found = coupled(asked, 2)
    by = (replace(found, verdict=one, split=replace(found.split, admitted=0.5)) for one in (None, late, at_once))
    assert [worth(evaluate(asked, Layout(1, 1)), one).partition(" and ")[2].partition(";")[0] for one in by] == [
        "admit 50.0% of requests at once, not 0.95",
        f"miss the TTFT SLO, with {late.within_ttft.mean:.1%} of requests in time",
        f"admit {at_once.immediate.mean:.1%} of requests at once, which --iar forbids",
    ]


def test_headroom_is_where_the_plan_stops_meeting_its_slos():
    asked = question()
    chosen = smallest(asked).chosen
    factor = headroom(asked, chosen)
    grown, beyond = (replace(asked, global_batch=asked.global_batch * factor * more) for more in (1, 1.02))
    assert factor >= 1 and not evaluate(grown, chosen.layout).failed and evaluate(beyond, chosen.layout).failed


def test_a_band_is_the_same_calls_with_longer_and_shorter_steps_and_outputs():
    asked = question(**QWEN, **DECODING, adapters=300)
    chosen = smallest(asked).chosen
    modelled = band(chosen, simulated=False)
    busier, quieter = (question(**QWEN, **DECODING, adapters=300, batch_size=64.0 * factor**2) for factor in (1.2, 0.8))
    assert modelled.low == pytest.approx(busier.cache.iar(chosen.slots), abs=1e-9)
    assert modelled.high == pytest.approx(quieter.cache.iar(chosen.slots), abs=1e-9)
    assert modelled.low < chosen.scenario.cache.iar(chosen.slots) < modelled.high
    enough = replace(chosen, slots=busier.cache.min_cache_slots)
    seen = band(enough, simulated=True)
    assert (seen.low, seen.high) == pytest.approx((busier.cache.iar(enough.slots), 1.0), abs=0.015)
    few = replace(chosen, slots=chosen.scenario.cache.min_cache_slots)
    tight = band(few, simulated=False)
    assert few.scenario.cache.iar(few.slots) >= 0.95 and not tight.holds and tight.meets_tpot
    hurried = replace(few, step_us=90_000.0)
    assert not band(hurried, simulated=False).meets_tpot
    result = answer(asked, seeds=0)
    assert document(result)["band"]["share"] == [result.band.low, result.band.high]
    said = [row for row in render.rows(replace(result, band=tight)) if "±20 %" in row[0]]
    missed = "+20 %: immediate admission missed"
    assert said == [("immediate admission, assumptions ±20 %", f"{tight.low:.4f} to {tight.high:.4f}", missed)]
    assert document(answer(question(**QWEN, max_gpus=1, adapters=5000, zipf=0.5), seeds=0))["band"] is None


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


def test_out_is_only_what_serve_knows_and_report_stands_alone(tmp_path):
    out, report = tmp_path / "plan.yaml", tmp_path / "plan.html"
    plan = as_json(*ASKED, "--out", out, "--report", report, "--no-simulate")
    config = yaml.safe_load(out.read_text())
    layout = f"ep{plan['layout']['ep']}-pp{plan['layout']['pp']}"
    adapter = memory.fullest_shard_bytes(spec.load("mixtral-8x7b"), Layout.parse(layout), question().model.lora_rank)
    pool = plan["cache_slots"] * adapter
    assert config == {
        "base_model": "mixtral-8x7b", "layout": layout, "nodes": 1, "device": "cuda", "dtype": "bfloat16",
        "device_pool": pool, "host_pool": (512 - plan["cache_slots"]) * adapter, "wire": "exact",
        "max_step_rows": 256,  # 64 requests and three deviations, times top-2
    }  # fmt: skip
    served = config_of({}, out)
    assert (served.device, served.dtype, served.device_pool) == ("cuda", "bfloat16", Size(pool))
    assert any("Planned for transport nvshmem" in line for line in plan["unmet_assumptions"])
    assert all(f"# {line}\n" in out.read_text() for line in plan["unmet_assumptions"])
    page = report.read_text()
    assert page.count("data:image/png;base64,") == 5
    assert not re.search(r"https?://|<script|<link|width:\s*\d+px|\de[+-]\d\d|IAR", re.sub('base64,[^"]+', "", page))
    headline = f"{plan['gpus']} LoRA Server GPUs as {layout}"
    assert f"<h1>{headline}" in page and f"<title>{headline}" in page and plan["coupled"]["verdict"] in page
    assert 'name="viewport"' in page and "prefers-color-scheme:dark" in page and "512 adapters of rank 64" in page
    wide = provision(*ASKED, "--gpus-per-node", "1", "--wire", "e4m3", "--out", out, "--no-simulate")
    assert wide.exit_code == 0
    assert yaml.safe_load(out.read_text())["nodes"] == 2
    assert config_of({}, out).wire == "e4m3"


def test_the_plot_of_layouts_has_one_mark_per_point_and_names_those_that_meet():
    """Layouts of as many GPUs have as many slots, and some of them may be too slow."""
    result = answer(question(adapters=64, zipf=1.2, batch_size=256), seeds=0)
    axes = Figure().add_subplot()
    charts.region(axes, result)
    marks = Counter(tuple(place) for one in axes.collections for place in one.get_offsets().tolist())
    assert len(marks) > 8 and set(marks.values()) == {1}
    assert [text.get_text() for text in axes.texts][:2] == ["ep2-pp2", "ep3-pp2"]
