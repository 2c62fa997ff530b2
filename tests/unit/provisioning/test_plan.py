"""The plan and the command: keys, exit codes, refutation, files, no torch."""

import json
import math
import re
import time
from dataclasses import replace

import pytest
import yaml
from typer.testing import CliRunner

from lora_server import spec
from lora_server.config import load as config_of
from lora_server.placement import Layout
from lora_server.units import Size
from provisioning.cli import app
from provisioning.inputs import InputError
from provisioning.model import memory
from provisioning.plan import slo
from provisioning.plan.candidates import evaluate
from provisioning.plan.choice import smallest
from provisioning.plan.scenario import Flags, scenario
from provisioning.plan.sensitivity import headroom
from provisioning.plan.verify import verify
from provisioning.report.document import document
from provisioning.report.result import answer

SLO = "ttft_p95=250ms,tpot_avg=100ms"
BASE = ["--slo", SLO, "--model", "mixtral-8x7b", "--adapters", "512", "--zipf", "1.2"]
LOAD = ["--instances", "4", "--batch-size", "64"]
TABLE_3 = [("gpt-oss-20b", 64), ("qwen3-30b-a3b", 32), ("mixtral-8x7b", 64), ("scaled-moe", 64), ("dbrx", 64)]
KEYS = {
    "feasible", "gpus", "layout", "min_cache_slots", "cache_slots", "iar", "iar_target", "binding_constraint",
    "latency_us", "coupled", "sensitivity", "simulation", "provenance",
}  # fmt: skip


def provision(*arguments: str):
    return CliRunner().invoke(app, list(arguments))


def question(**changes):
    options = {"slo": SLO, "model": "mixtral-8x7b", "adapters": 512, "zipf": 1.2, "instances": 4, "batch_size": 64.0}
    return scenario(Flags(**(options | changes)))


def check_finite(value):
    if isinstance(value, dict):
        for item in value.values():
            check_finite(item)
    elif isinstance(value, list):
        for item in value:
            check_finite(item)
    elif isinstance(value, float):
        assert math.isfinite(value)


@pytest.mark.parametrize(("model", "rank"), TABLE_3)
def test_every_table_3_model_has_a_plan_that_its_simulation_bears_out(model, rank):
    start = time.process_time()
    outcome = provision(*BASE, *LOAD, "--model", model, "--lora-rank", str(rank), "--json")
    assert time.process_time() - start < 48  # the bar is 12 s on a machine of one's own
    assert outcome.exit_code == 0, outcome.output
    plan = json.loads(outcome.stdout)
    assert set(plan) >= KEYS
    assert plan["feasible"] and plan["gpus"] == plan["layout"]["ep"] * plan["layout"]["pp"]
    assert plan["cache_slots"] >= plan["min_cache_slots"]
    assert plan["iar"] >= plan["iar_target"] == 0.95
    latency = plan["latency_us"]
    assert latency["recv"] + latency["compute"] + latency["send"] == pytest.approx(latency["total"])
    assert latency["total"] <= latency["budget"]
    simulation = plan["simulation"]
    assert simulation["seeds"] >= 5 and simulation["holds_target"] and simulation["interval"][0] >= 0.95
    assert simulation["refuted"] == [] and not simulation["below_model"]
    if plan["gpus"] > 1:
        assert simulation["refuted_below"][0]["gpus"] == plan["gpus"] - 1
    assert plan["coupled"]["verdict"] and plan["sensitivity"]
    assert {entry["kind"] for entry in plan["provenance"].values()} <= {"measured", "extrapolated", "assumed"}
    check_finite(plan)


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


@pytest.mark.parametrize(
    ("changes", "binding"),
    [
        ({"max_gpus": 1}, "cache"),
        ({"slo": "ttft_p95=1ms,tpot_avg=100ms"}, "ttft"),
        ({"slo": "ttft_p95=250ms,tpot_avg=2ms"}, "tpot"),
        ({"link_gbps": 1.0}, "network"),
        ({"lora_rank": 4096, "adapters": 4, "batch_size": 256.0, "slo": "ttft_p95=9s,tpot_avg=25ms"}, "compute"),
    ],
)
def test_infeasible_names_what_binds(changes, binding):
    choice = smallest(question(**changes))
    assert choice.chosen is None
    assert choice.binding == binding, choice


TIGHT = {"gpu": "h100", "adapters": 200, "context_tokens": 8192.0}  # KV of 59 requests an instance


def test_the_engines_hold_the_kv_of_what_they_serve():
    refused = answer(question(**TIGHT, batch_size=120.0), seeds=0)
    assert (
        refused.candidate.failed == ("kv",)
        and refused.candidate.gpus <= 8
        and document(refused)["load"]["batch_limit_by_kv"] == 59
    )
    helps = {item.change: item.gpus for item in refused.variants}
    assert helps["instances 8, the load spread over them"] is None and helps["memory per GPU x2"]
    assert smallest(question(**TIGHT, batch_size=30.0)).feasible
    full = answer(question(**TIGHT, batch_size=58.0), seeds=5)  # on average: now and then there are more than fit
    assert not full.feasible and full.verified.choice.binding == "kv"


def test_infeasible_is_exit_3_with_json():
    outcome = provision(*BASE, *LOAD, "--max-gpus", "1", "--json")
    assert outcome.exit_code == 3
    plan = json.loads(outcome.stdout)
    assert not plan["feasible"] and plan["binding_constraint"] == "cache" and plan["gpus"] is None
    assert set(plan) >= KEYS
    assert provision(*BASE, *LOAD, "--max-gpus", "1").exit_code == 3


def test_percentile_sets_the_target_unless_iar_is_given():
    assert question(slo="ttft_p99=250ms,tpot_avg=100ms").iar_target == 0.99
    assert question(iar=0.9).iar_target == 0.9
    assert question(iar=0.9).min_cache_slots < question().min_cache_slots


def test_whole_nodes():
    asked = question(whole_nodes=True)
    choice = smallest(asked)
    assert choice.chosen is not None and choice.chosen.gpus == 8
    assert choice.binding == "node_granularity"


def test_a_refuted_plan_gets_more_gpus_and_says_so():
    asked = question(burst_cv=5.0, adapters=2000, zipf=0.6, model="qwen3-30b-a3b", lora_rank=64)
    first = smallest(asked)
    verified = verify(asked, first, 5)
    assert verified.refuted, "bursts of this size should refute a Poisson model"
    assert verified.refuted[0].candidate.gpus == first.chosen.gpus
    if verified.choice.chosen is not None:
        assert verified.choice.chosen.gpus > first.chosen.gpus
        assert verified.verdict.immediate.low >= 0.95
        assert verified.choice.binding == "simulation"


HOT = ["--slo", SLO, "--model", "mixtral-8x7b", "--adapters", "100", "--zipf", "1.6", "--instances", "4"]
HOT += ["--batch-size", "250", "--gpu-memory-gib", "106"]


def test_the_simulation_goes_below_a_model_that_is_too_pessimistic():
    """`offered` asks for two GPUs here, 62 slots; the 57 of one hold."""
    outcome = provision(*HOT, "--json")
    assert outcome.exit_code == 0, outcome.output
    plan = json.loads(outcome.stdout)
    simulation = plan["simulation"]
    assert plan["gpus"] == 1 and plan["cache_slots"] < plan["min_cache_slots"] and plan["iar"] < 0.95
    assert simulation["interval"][0] >= 0.95 and simulation["below_model"] and simulation["refuted"] == []
    assert simulation["model_gpus"] == 2 and simulation["gpus_saved"] == 1 and simulation["gpus_added"] == 0
    assert plan["binding_constraint"] == "cache" and plan["load_headroom"] is None


@pytest.mark.parametrize("changes", [{"iar": 1.0}, {"slo": "ttft_p100=250ms,tpot_avg=100ms"}])
def test_no_run_proves_that_nobody_ever_waits(changes):
    """30,000 calls without a miss are no proof of an IAR of 1, for which all adapters must fit."""
    asked = question(adapters=180, **changes)
    first = smallest(asked)
    verified = verify(asked, first, 5)
    assert verified.choice.chosen is first.chosen and first.chosen.slots >= 180
    fewer = replace(asked, max_gpus=first.chosen.gpus - 1)
    assert verify(fewer, smallest(fewer), 5).choice.chosen is None


def test_a_plan_that_only_the_simulation_knows_of_says_so():
    """With one GPU at most the model has no plan for the same question."""
    outcome = provision(*HOT, "--max-gpus", "1")
    assert outcome.exit_code == 0, outcome.output
    text = " ".join(outcome.stdout.split())
    assert "The model has no plan" in text and "simulation went below it: the target holds with 1 GPU" in text


def test_fewer_gpus_that_were_refuted_are_named():
    outcome = provision(*BASE, *LOAD)
    text = " ".join(outcome.stdout.split())
    assert "Fewer slots do not: 1 GPU (ep1-pp1, 76 slots" in text


def test_where_nothing_is_feasible_it_says_what_would_make_it_so():
    for changes, helps in (
        ({"max_gpus": 1}, "max GPUs 2"),
        ({"slo": "ttft_p95=15ms,tpot_avg=100ms"}, "TTFT SLO 30 ms"),
        ({"slo": "ttft_p95=250ms,tpot_avg=10ms"}, "TPOT SLO 20 ms"),
    ):
        result = answer(question(**changes), seeds=0)
        assert not result.feasible
        plan = document(result)
        rows = {row["change"]: row for row in plan["sensitivity"]}
        assert rows[helps]["gpus"], helps
        assert rows["gpus +1"]["gpus"] == plan["closest"]["gpus"] + 1
        assert plan["coupled"]["evaluated"] and plan["coupled"]["verdict"]
        check_finite(plan)


def test_coupled_verdict_goes_both_ways():
    roomy = document(answer(question(), seeds=0))["coupled"]
    assert not roomy["lora_server_worth_it"] and "not worth it" in roomy["verdict"]
    tight = document(answer(question(gpu="h100", model="gpt-oss-20b", adapters=1000, batch_size=128.0), seeds=0))[
        "coupled"
    ]
    assert tight["lora_server_worth_it"] and tight["gpus_needed"] > tight["gpus"]


def test_headroom_is_where_the_plan_stops_meeting_its_slos():
    asked = question()
    chosen = smallest(asked).chosen
    factor = headroom(asked, chosen)
    assert factor >= 1
    grown, beyond = (replace(asked, global_batch=asked.global_batch * factor * more) for more in (1, 1.02))
    assert not evaluate(grown, chosen.layout).failed and evaluate(beyond, chosen.layout).failed


def test_cost():
    result = answer(question(), seeds=0, price_per_gpu_hour=2.0)
    cost = result.cost()
    assert cost["lora_server_per_hour"] == 2.0 * result.candidate.gpus
    assert cost["total_per_month"] == pytest.approx(cost["total_per_hour"] * 730)


def test_out_is_only_what_serve_knows_and_report_stands_alone(tmp_path):
    out, report = tmp_path / "plan.yaml", tmp_path / "plan.html"
    outcome = provision(*BASE, *LOAD, "--out", str(out), "--report", str(report), "--no-simulate", "--json")
    assert outcome.exit_code == 0
    plan, config = json.loads(outcome.stdout), yaml.safe_load(out.read_text())
    layout = f"ep{plan['layout']['ep']}-pp{plan['layout']['pp']}"
    adapter = memory.fullest_shard_bytes(spec.load("mixtral-8x7b"), Layout.parse(layout), question().model.lora_rank)
    pool = plan["cache_slots"] * adapter
    assert config == {
        "base_model": "mixtral-8x7b",
        "layout": layout,
        "nodes": 1,
        "device": "cuda",
        "dtype": "bfloat16",
        "device_pool": pool,
        "host_pool": (512 - plan["cache_slots"]) * adapter,
        "max_step_rows": 256,  # 64 requests and three deviations, times top-2
        "wire": "exact",
    }
    served = config_of({}, out)
    assert (served.device, served.dtype, served.device_pool) == ("cuda", "bfloat16", Size(pool))
    assert any("Not met today" in line for line in plan["unmet_assumptions"])
    assert all(f"# {line}\n" in out.read_text() for line in plan["unmet_assumptions"])
    page = report.read_text()
    assert page.count("data:image/png;base64,") == 5
    assert not re.search(r"https?://|<script|<link|width:\s*\d+px|\de[+-]\d\d", re.sub('base64,[^"]+', "", page))
    headline = f"{plan['gpus']} LoRA Server GPUs as {layout}"
    assert f"<h1>{headline}" in page and f"<title>{headline}" in page and plan["coupled"]["verdict"] in page
    assert 'name="viewport"' in page and "prefers-color-scheme:dark" in page and "512 adapters of rank 64" in page
    wide = provision(*BASE, *LOAD, "--gpus-per-node", "1", "--wire", "e4m3", "--out", str(out), "--no-simulate")
    assert wide.exit_code == 0
    assert yaml.safe_load(out.read_text())["nodes"] == 2
    assert config_of({}, out).wire == "e4m3"


def test_a_trace_is_planned_and_replayed(tmp_path):
    trace = tmp_path / "t.csv"
    lines = [f"{index * 0.05:.3f},a{index * index % 37},100,{20 + index % 50}" for index in range(3000)]
    trace.write_text("timestamp,adapter,input_tokens,output_tokens\n" + "\n".join(lines))
    outcome = provision("--slo", SLO, "--model", "mixtral-8x7b", "--trace", str(trace), "--json")
    assert outcome.exit_code == 0, outcome.output
    plan = json.loads(outcome.stdout)
    load, step_s = plan["load"], plan["latency_us"]["decode_step"] * 1e-6
    assert load["request_rate"] == pytest.approx(20, rel=0.01)
    assert load["global_batch"] == pytest.approx(load["request_rate"] * 44.5 * step_s, rel=0.01)
    assert plan["provenance"]["output_tokens"]["kind"] == "measured"
    assert plan["simulation"]["simulated"] and plan["warnings"] == []
    trace.write_text("\n".join(["timestamp,adapter,input_tokens,output_tokens", *lines[:2]]))
    few = provision("--slo", SLO, "--model", "mixtral-8x7b", "--trace", str(trace))
    assert "Warning: the trace has 2 requests, too few to bear a plan out" in few.stdout


def test_slo_units():
    assert slo.parse(" tpot_avg = 0.1s , ttft_p99.9=2.5e5us") == slo.Slo(250_000, 99.9, 100_000)
    with pytest.raises(InputError, match="--slo"):
        slo.parse("")
