"""Traffic as it is: lengths that differ by adapter, load that varies, and that the very trace is served."""

import json
from dataclasses import replace

import numpy as np
import pytest

from provisioning.iar.models import offered_curve
from provisioning.plan.choice import smallest
from provisioning.plan.judge import judge, played
from provisioning.plan.verify import disaggregated, verify
from provisioning.report import charts, render
from provisioning.report.document import document
from provisioning.report.result import answer
from provisioning.simulation.run import run
from provisioning.workload.replay import over_time, replayed
from provisioning.workload.requests import Requests
from provisioning.workload.workload import Workload
from tests.support import provision as support
from tests.support.provision import ADAPTERS, KINDS, QWEN, SLO, calls, provision, typed, write, write_counts

LOAD = 256.0  # in flight: four instances of 64


def question(**given):
    """Of the traffic in a file."""
    return support.question(**(QWEN | {"adapters": None} | given))


def requests(arrival_s, tokens, adapter=None, names=()):
    arrival_s = np.asarray(arrival_s, dtype=float)
    adapter = np.zeros(arrival_s.size, dtype=np.int64) if adapter is None else adapter
    return Requests(
        arrival_s=arrival_s, adapter=adapter, output_tokens=np.asarray(tokens), num_adapters=ADAPTERS, names=names
    )


@pytest.mark.parametrize(
    ("kind", "seed"),
    [pytest.param(kind, 10 + at, marks=[] if kind == "bursts" else pytest.mark.long) for at, kind in enumerate(KINDS)],
)
def test_a_plan_serves_the_very_trace_that_it_was_made_for(tmp_path, kind, seed):
    """Replayed as it is, at the load that was asked for: none of the planner's own windows, rotations or scaling."""
    asked = question(trace=write(tmp_path / "trace.csv", kind, seed))
    chosen = verify(asked, smallest(asked), 5).choice.chosen
    assert chosen is not None
    arrival_s, adapter, tokens = calls(kind, seed)
    step_s = chosen.mean_step_us * 1e-6
    slower = tokens.sum() * step_s / ((arrival_s[-1] - arrival_s[0]) * LOAD)
    index = {name: place for place, name in enumerate(asked.workload.trace.names)}
    played = Requests(
        arrival_s=(arrival_s - arrival_s[0]) * slower,
        adapter=np.array([index[f"adapter-{i}"] for i in adapter]),
        output_tokens=tokens,
        num_adapters=len(index),
    )
    assert run(played, disaggregated(chosen)).immediate.mean() >= asked.iar_target


@pytest.mark.long
def test_counts_with_lengths_plan_as_the_trace_does(tmp_path):
    """A tail that writes four times as much: by requests alone, fewer slots seem to be enough."""
    counted = question(counts=write_counts(tmp_path / "counts.csv", "long-tail", 3))
    traced = question(trace=write(tmp_path / "trace.csv", "long-tail", 3))
    assert counted.min_cache_slots == traced.min_cache_slots
    by_requests = int(np.argmax(offered_curve(counted.workload.popularity, LOAD) >= 0.95))
    assert by_requests < counted.min_cache_slots - 20
    assert sorted(counted.workload.in_flight) == pytest.approx(sorted(traced.workload.in_flight), abs=1e-5)
    gpus = [verify(asked, smallest(asked), 5).choice.chosen.gpus for asked in (counted, traced)]
    assert gpus[0] == gpus[1]


def test_samples_write_as_long_as_their_adapters_do():
    workload = Workload(popularity=np.array([0.75, 0.25]), tokens=np.array([100.0, 900.0]))
    workload = workload.with_mean_tokens(workload.lengths.mean_tokens)
    made = Workload(popularity=workload.popularity, tokens=np.array([100.0, 900.0])).sample(
        rate=5.0, num_requests=40_000, seed=2
    )
    ratio = made.mean_tokens()[1] / made.mean_tokens()[0]
    assert ratio == pytest.approx(9, rel=0.05)
    assert workload.in_flight == pytest.approx([0.25, 0.75])


def test_a_steady_load_has_no_peak_and_a_diurnal_one_has():
    for kind, low, high in (("steady", 1, 1), ("diurnal", 1.5, 1.75)):
        arrival_s, _, tokens = calls(kind, 4)
        found = over_time(requests(arrival_s, tokens))
        assert found.steady == (high == 1) and low <= found.peak <= high
    assert found.window_s == pytest.approx(240, rel=0.02)  # 1,000 of 15,000 requests in an hour
    assert 300 < found.start_s + found.window_s / 2 < 1500  # a quarter of the hour in
    assert over_time(requests(arrival_s, tokens), 3600.0).peak == 1
    assert over_time(requests(arrival_s, tokens), 60.0).peak > found.peak
    assert found.load_W.mean() == pytest.approx(1, abs=0.05)


def test_the_peak_is_by_tokens():
    """Half as many requests in the second half, each eight times as long."""
    found = over_time(requests(np.r_[np.arange(4000), 4000 + 2 * np.arange(2000)], [10] * 4000 + [80] * 2000))
    assert found.start_s == pytest.approx(4000, abs=1) and found.peak == pytest.approx(1.6, rel=0.01)


def test_what_is_replayed_of_a_long_trace_has_its_peak():
    trace = Workload(
        popularity=np.ones(1),
        trace=requests(np.r_[np.arange(0, 50_000, 1.0), 50_000 + np.arange(0, 2000, 0.5)], [10] * 54_000, names=("a",)),
    ).sized_for(1000.0)
    assert trace.peak == pytest.approx(1.93, abs=0.02)
    for seed in (1, 2):
        part = replayed(trace.trace, 8000, seed)
        assert len(part) == 8000 and part.at_peak.sum() == trace.trace.at_peak.sum()
    assert len(replayed(trace.trace, 8000, 0)) == 54_000
    at_peak = trace.calls(tokens_per_s=500.0, num=8000, seed=1)
    inside = at_peak.arrival_s[at_peak.at_peak]
    assert inside.size * 10 / (inside[-1] - inside[0]) == pytest.approx(500, rel=0.01)


def test_the_plan_says_what_it_is_sized_for(tmp_path):
    trace = write(tmp_path / "t.csv", "diurnal", 5)
    result = answer(question(trace=trace), seeds=0)
    text = " ".join(render.load_over_time(result))
    assert "Load over time: " in text and "Sized for its peak, 1." in text and "(--window)" in text
    assert "requests each in flight at the peak" in render.question(result)
    load = document(result)["load"]
    assert load["batch"] == pytest.approx(64) and load["global_batch"] == pytest.approx(LOAD)
    assert load["peak"]["global_batch"] == pytest.approx(LOAD * load["peak"]["load_over_mean"])
    assert load["peak"]["load_over_mean"] > 1.5 and not load["peak"]["steady"]
    assert next(title for title, _ in charts.charts(result)) == "Load over time"
    assert charts.png(charts.load_over_time, result).startswith(b"\x89PNG")
    steady = answer(question(trace=write(tmp_path / "s.csv", "steady", 5)), seeds=0)
    assert "It is steady" in " ".join(render.load_over_time(steady))
    assert not list(render.load_over_time(answer(question(adapters=10), seeds=0)))


def test_a_rate_is_the_mean_and_its_batch_that_of_the_peak(tmp_path):
    trace = write(tmp_path / "t.csv", "diurnal", 5)
    free = {"instances": None, "batch_size": None, "request_rate": 30.0}
    result = answer(question(trace=trace, model="mixtral-8x7b", **free), seeds=0, price_per_gpu_hour=1.0)
    found, step_s = result.scenario, result.candidate.mean_step_us * 1e-6
    tokens = found.workload.lengths.mean_tokens
    assert found.workload.peak > 1.5 and result.rate == pytest.approx(30)
    assert found.global_batch == pytest.approx(30 * found.workload.peak * tokens * step_s)
    assert played(found, result.candidate.mean_step_us, 0).mean_rate() == pytest.approx(30)
    assert result.cost()["total_per_million_tokens"] == pytest.approx(result.candidate.all_gpus / (0.108 * tokens))


def test_what_is_emitted_is_the_load_and_reads_back(tmp_path):
    counts, load = write_counts(tmp_path / "counts.csv", "long-tail", 3), {"instances": 2, "batch_size": 32.0}
    asked = typed(slo=SLO, **QWEN, **load, counts=counts, emit=tmp_path / "out")
    made = provision(*asked, "--no-simulate", "--json")
    assert made.exit_code == 0, made.output
    plan = json.loads(made.stdout)
    back = question(trace=tmp_path / "out" / "trace.csv", **load)
    trace = back.workload.trace
    tokens_per_s = trace.output_tokens.sum() / trace.span_s
    assert tokens_per_s * plan["latency_us"]["decode_step"] * 1e-6 == pytest.approx(64, rel=0.05)
    assert abs(back.min_cache_slots - plan["min_cache_slots"]) <= 3
    assert set(trace.names) <= set(counts.read_text().replace(",", "\n").split())
    lines = (tmp_path / "out" / "commands.sh").read_text().splitlines()
    assert sum(line.startswith("lora-server serve --config plan.yaml") for line in lines) == 1
    served = [line for line in lines if "vllm serve" in line]
    assert len(served) == 2 and "--port 8000" in served[0] and "--port 8001" in served[1]
    assert "layout: " in (tmp_path / "out" / "plan.yaml").read_text()


def test_the_worst_served_are_named(tmp_path):
    """With two thirds of the slots that the target needs."""
    asked = question(counts=write_counts(tmp_path / "c.csv", "steady", 6))
    result = answer(asked, seeds=0)
    few = replace(disaggregated(result.candidate), cache_slots=asked.min_cache_slots * 2 // 3)
    verdict = judge(asked, few, result.candidate.mean_step_us, 2)
    worst = verdict.worst_served()
    assert len(worst) == 5 and all(calls >= 20 and share < 0.95 for _, calls, share in worst)
    assert [share for *_, share in worst] == sorted(share for *_, share in worst)
    line = " ".join(render.worst_served(replace(result, verified=replace(result.verified, verdict=verdict))))
    assert line.startswith("Served worst") and f"{asked.workload.names[worst[0][0]]} " in line


def test_a_trace_is_planned_and_replayed(tmp_path):
    trace = tmp_path / "t.csv"
    lines = [f"{index * 0.05:.3f},a{index * index % 37},100,{20 + index % 50}" for index in range(3000)]
    trace.write_text("timestamp,adapter,input_tokens,output_tokens\n" + "\n".join(lines))
    asked = typed(slo=SLO, model="mixtral-8x7b", trace=trace)
    outcome = provision(*asked, "--json")
    assert outcome.exit_code == 0, outcome.output
    plan = json.loads(outcome.stdout)
    load, step_s = plan["load"], plan["latency_us"]["decode_step"] * 1e-6
    assert load["request_rate"] == pytest.approx(20, rel=0.01)
    assert load["global_batch"] == pytest.approx(load["request_rate"] * 44.5 * step_s, rel=0.01)
    assert plan["provenance"]["output_tokens"]["kind"] == "measured"
    assert plan["simulation"]["simulated"] and plan["warnings"] == []
    trace.write_text("\n".join(["timestamp,adapter,input_tokens,output_tokens", *lines[:2]]))
    assert "Warning: the trace has 2 requests, too few to bear a plan out" in provision(*asked).stdout
