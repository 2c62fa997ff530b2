"""Popularity, lengths, arrivals, the readers of traces, load that varies, and that the very trace is served."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from provisioning.iar.models import offered_curve
from provisioning.inputs import InputError, normalised
from provisioning.plan.choice import smallest
from provisioning.plan.flags import PlanFlags
from provisioning.plan.judge import judge, played
from provisioning.plan.scenario import scenario, workload
from provisioning.plan.verify import disaggregated, verify
from provisioning.report import charts, render, words
from provisioning.report.document import document
from provisioning.report.result import answer
from provisioning.simulation.run import run
from provisioning.workload import servegen, traces
from provisioning.workload.counts import read_counts
from provisioning.workload.replay import about_peak, over_time
from provisioning.workload.requests import Lengths, renewal_gaps
from provisioning.workload.workload import Workload, zipf
from tests.support import provision as support
from tests.support.provision import KINDS, QWEN, SLO, as_json, calls, provision, requests, typed, write, write_counts

SHARED = Path(__file__).parents[4] / "shared" / "traces"
shared = pytest.mark.skipif(not SHARED.is_dir(), reason="shared/traces is not here")


def test_zipf_and_counts():
    assert zipf(1.0, 4) == pytest.approx(np.array([12, 6, 4, 3]) / 25)
    assert zipf(0, 3) == pytest.approx([1 / 3] * 3)
    assert normalised([3, 1], "counts") == pytest.approx([0.75, 0.25])
    with pytest.raises(InputError, match="counts"):
        normalised([0, 0], "counts")


def test_read_counts(tmp_path):
    (tmp_path / "c.csv").write_text("adapter,count\nlaw,3\ncode,1\n")
    (tmp_path / "c.json").write_text('{"law": 3, "code": 1}')
    (tmp_path / "bom.json").write_text("\ufeff[3, 1]", encoding="utf-8")
    (tmp_path / "headings.csv").write_text("\ufeffname,calls_total\nlaw,3\n\ncode,1e0\n", encoding="utf-8")
    (tmp_path / "bare.csv").write_text("3\n1\n")
    for name in ("c.csv", "c.json", "bom.json", "headings.csv", "bare.csv"):
        found = read_counts(tmp_path / name)
        assert found.popularity == pytest.approx([0.75, 0.25]), name
        assert found.tokens is None and not found.lengths.source


@pytest.mark.parametrize(("name", "text"), [
    ("c.csv", "adapter,count,mean_output_tokens\nlaw,3,100\ncode,1,500\n"),
    ("c.csv", "law,3,100\ncode,1,5e2\n"),
    ("c.json", '{"law": {"count": 3, "mean_output_tokens": 100}, "code": {"count": 1, "mean_output_tokens": 500}}'),
    ("c.json", '[{"count": 3, "mean_output_tokens": 100}, {"mean_output_tokens": 500, "count": 1}]'),
])  # fmt: skip
def test_counts_with_lengths(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    found = read_counts(tmp_path / name)
    assert found.popularity == pytest.approx([0.75, 0.25]) and found.tokens.tolist() == [100, 500]
    assert found.lengths.mean_tokens == pytest.approx(200) and found.lengths.source == str(tmp_path / name)
    assert found.in_flight == pytest.approx([0.375, 0.625])
    longer = workload(PlanFlags(slo="", model="", counts=tmp_path / name, mean_output_tokens=400.0))
    assert longer.tokens.tolist() == [200, 1000] and longer.lengths.mean_tokens == 400


def test_samples_follow_the_workload_and_its_seed():
    workload = Workload(popularity=zipf(1.2, 50), lengths=Lengths(mean_tokens=80, cv=0.7))
    first, again = (workload.sample(rate=25, num_requests=40_000, seed=3) for _ in range(2))
    assert (first.arrival_s == again.arrival_s).all() and (first.adapter == again.adapter).all()
    assert len(first) / first.span_s == pytest.approx(25, rel=0.03)
    assert first.output_tokens.mean() == pytest.approx(80, rel=0.03)
    assert first.counts() / len(first) == pytest.approx(workload.popularity, abs=0.01)


@pytest.mark.parametrize("cv", [0.0, 0.5, 1.0, 3.0])
def test_gaps_have_mean_1_and_the_cv(cv):
    gaps = renewal_gaps(np.random.default_rng(1), cv, 200_000)
    assert gaps.mean() == pytest.approx(1, rel=0.05)
    assert gaps.std() == pytest.approx(cv, rel=0.05, abs=1e-9)


def test_csv_and_jsonl_with_adapters_agree(tmp_path):
    lines = [(3.0, "b", 10, 7), (1.0, "a", 20, 5), (2.0, "b", 30, 6)]
    table = tmp_path / "t.csv"
    rows = "".join(f"{t},{a},{i},{o}\n" for t, a, i, o in lines)
    table.write_text(f"timestamp,adapter,input_tokens,output_tokens\n{rows}")
    stream = tmp_path / "t.jsonl"
    keys = ("timestamp", "lora", "prompt_tokens", "completion_tokens")
    stream.write_text("".join(json.dumps(dict(zip(keys, line, strict=True))) + "\n" for line in lines))
    for file in (table, stream):
        requests, named = traces.read(file)
        assert named and requests.names == ("a", "b")
        assert requests.arrival_s.tolist() == [0, 1, 2]
        assert requests.adapter.tolist() == [0, 1, 1]
        assert requests.output_tokens.tolist() == [5, 6, 7]
        assert traces.load(file).popularity == pytest.approx([1 / 3, 2 / 3])


def test_dates_and_milliseconds(tmp_path):
    azure = tmp_path / "azure.csv"
    rows = "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
    azure.write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n{rows}")
    requests, named = traces.read(azure, traces.ZipfAdapters(num_adapters=7, skew=1.0, seed=5))
    assert not named and requests.num_adapters == 7
    assert requests.arrival_s == pytest.approx([0, 4.314579])
    mooncake = tmp_path / "mooncake.jsonl"
    row = {"timestamp": 0, "input_length": 6, "output_length": 5, "hash_ids": [1]}
    mooncake.write_text(json.dumps(row) + "\n" + json.dumps(row | {"timestamp": 1500}) + "\n")
    assert traces.read(mooncake)[0].arrival_s.tolist() == [0, 1.5]


def test_servegen_clients_are_adapters(tmp_path):
    (tmp_path / "chunk-0-trace.csv").write_text("0,2.0,1.0,Gamma,1.0,0.5\n600,4.0,2.0,Gamma,0.25,1.0\n")
    (tmp_path / "chunk-10-trace.csv").write_text("0,1.0,1.0,Weibull,1.0,1.0\n600,0,0,,0,0\n")
    clients = servegen.load(tmp_path)
    assert clients.names == ("chunk-0", "chunk-10")
    requests = clients.requests(start_s=0, span_s=1200, seed=1)
    assert requests.counts() == pytest.approx([3600, 600], rel=0.15)
    slower = clients.requests(start_s=0, span_s=1200, seed=1, rate=1.0)
    assert len(slower) == pytest.approx(1200, rel=0.15) and slower.span_s < 1200
    with pytest.raises(InputError, match="no traffic"):
        clients.requests(start_s=5000, span_s=10, seed=1)


def test_servegen_has_its_own_rate_lengths_and_clients_that_are_off(tmp_path):
    """A client with long outputs, one that is off in the busier window and one without lengths that never calls."""
    (tmp_path / "chunk-0-trace.csv").write_text("0,2,1,Gamma,1,0.5\n600,4,1,Gamma,1,0.25\n")
    (tmp_path / "chunk-1-trace.csv").write_text("0,1,1,Gamma,1,1\n600,0,0,,0,0\n")
    (tmp_path / "chunk-2-trace.csv").write_text("0,0,0,,0,0\n600,0,0,,0,0\n")
    flags = PlanFlags(slo=SLO, model="mixtral-8x7b", trace=tmp_path)
    assert workload(flags).own_rate == pytest.approx(3.5) and workload(flags).peak == pytest.approx(4 / 3.5)
    assert scenario(flags).global_batch == pytest.approx(4 * 256 * 0.1)
    assert scenario(replace(flags, request_rate=7.0)).global_batch == pytest.approx(8 * 256 * 0.1)
    empty = {"input_tokens": "{}", "output_tokens": "{}"}
    long = {"input_tokens": "{7: 1.0}", "output_tokens": "{100: 0.25, 300: 0.75}", "reason_ratio": "{0.5: 1.0}"}
    longer = {"output_tokens": "{500: 1.0}"}
    (tmp_path / "chunk-0-dataset.json").write_text(json.dumps({"0": long, "600": longer}))
    (tmp_path / "chunk-1-dataset.json").write_text(json.dumps({"0": empty, "300": {"output_tokens": {"50": 1.0}}}))
    found = traces.load(tmp_path)
    assert found.popularity.tolist() == [1, 0, 0]  # of the window from 600 s on
    assert found.tokens[0] == 500 and found.lengths.source == "2 chunk-*-dataset.json"
    loads = 2 * 250 + 50, 4 * 500
    assert found.lengths.mean_tokens == pytest.approx(sum(loads) / 7)
    assert found.given_rate == pytest.approx(3.5)
    assert found.peak == pytest.approx(loads[1] / (sum(loads) / 2)) and found.over_time.start_s == 600
    made = found.calls(tokens_per_s=2000.0, num=20_000, seed=3)
    assert len(made) == pytest.approx(20_000, rel=0.05) and set(made.adapter) == {0}
    assert made.output_tokens.sum() / made.span_s == pytest.approx(2000, rel=0.001)
    both = servegen.load(tmp_path).workload(1200.0)
    assert both.popularity == pytest.approx([6 / 7, 1 / 7, 0]) and both.peak == pytest.approx(1)
    assert both.tokens == pytest.approx([2500 / 6, 50, sum(loads) / 7])
    made = both.calls(tokens_per_s=500.0, num=20_000, seed=3)
    assert made.mean_tokens()[:2] == pytest.approx([2500 / 6, 50], rel=0.02)


def test_a_given_mean_stretches_the_outputs_that_a_trace_replays(tmp_path):
    (tmp_path / "t.csv").write_text("timestamp,adapter,output_tokens\n0,a,10\n1,b,30\n2,a,20\n")
    found = workload(PlanFlags(slo="", model="", trace=tmp_path / "t.csv", mean_output_tokens=100.0))
    assert found.trace.output_tokens.tolist() == [50, 150, 100]
    assert found.lengths.mean_tokens == 100


@shared
@pytest.mark.parametrize(("name", "rows"), [
    ("AzureLLMInferenceTrace_conv_2023.csv", 19_366),
    ("AzureLLMInferenceTrace_code_2023.csv", 8_819),
    ("mooncake_conversation_trace.jsonl", 12_031),
])  # fmt: skip
def test_shared_traces(name, rows):
    workload = traces.load(SHARED / name)
    assert len(workload.trace) == rows and workload.num_adapters == 512
    assert 3000 < workload.trace.span_s < 4000  # about an hour each


M_MID = pytest.param("m-mid", 109, 55, marks=pytest.mark.long)  # it takes 7 s to read


@shared
@pytest.mark.parametrize(("name", "clients", "median"), [("m-small", 43, 20), M_MID])
def test_shared_servegen(name, clients, median):
    found = servegen.load(SHARED / "servegen" / name)
    assert np.median((found.rates > 0).sum(axis=0)) == median  # of all, at any moment
    workload = found.workload()
    assert workload.num_adapters == clients > np.count_nonzero(workload.popularity)
    requests = workload.calls(tokens_per_s=20 * 256, num=10_000, seed=0)
    assert len(requests) / requests.span_s == pytest.approx(20, rel=0.1)


LOAD = 256.0  # in flight: four instances of 64


def question(**given):
    """Of the traffic in a file."""
    return support.question(**(QWEN | {"adapters": None} | given))


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
    places = [index[f"adapter-{i}"] for i in adapter]
    played = requests((arrival_s - arrival_s[0]) * slower, tokens, places, len(index))
    assert run(played, disaggregated(chosen)).immediate.mean() >= asked.iar_target


@pytest.mark.long
def test_counts_with_lengths_plan_as_the_trace_does(tmp_path):
    """A tail that writes four times as much: by requests alone, fewer slots seem to be enough."""
    counted = question(counts=write_counts(tmp_path / "counts.csv", "long-tail", 3))
    traced = question(trace=write(tmp_path / "trace.csv", "long-tail", 3))
    assert counted.cache.min_cache_slots == traced.cache.min_cache_slots
    by_requests = int(np.argmax(offered_curve(counted.workload.popularity, LOAD) >= 0.95))
    assert by_requests < counted.cache.min_cache_slots - 20
    assert sorted(counted.workload.in_flight) == pytest.approx(sorted(traced.workload.in_flight), abs=1e-5)
    gpus = [verify(asked, smallest(asked), 5).choice.chosen.gpus for asked in (counted, traced)]
    assert gpus[0] == gpus[1]


def test_samples_write_as_long_as_their_adapters_do():
    popularity, tokens = np.array([0.75, 0.25]), np.array([100.0, 900.0])
    workload = Workload(popularity=popularity, tokens=tokens)
    made = workload.sample(rate=5.0, num_requests=40_000, seed=2)
    assert made.mean_tokens()[1] / made.mean_tokens()[0] == pytest.approx(9, rel=0.05)
    assert workload.with_mean_tokens(workload.lengths.mean_tokens).in_flight == pytest.approx([0.25, 0.75])


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
    arrivals = np.r_[np.arange(0, 50_000, 1.0), 50_000 + np.arange(0, 2000, 0.5)]
    whole = requests(arrivals, [10] * 54_000, names=("a",))
    trace = Workload(popularity=np.ones(1), trace=whole).sized_for(1000.0)
    assert trace.peak == pytest.approx(1.93, abs=0.02)
    for seed in (1, 2):
        part = about_peak(trace.trace, 8000, seed)
        assert len(part) == 8000 and part.at_peak.sum() == trace.trace.at_peak.sum()
    assert len(about_peak(trace.trace, 8000, 0)) == 54_000
    at_peak = trace.calls(tokens_per_s=500.0, num=8000, seed=0)
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
    plan = as_json(*asked, "--no-simulate")
    back = question(trace=tmp_path / "out" / "trace.csv", **load)
    trace = back.workload.trace
    tokens_per_s = trace.output_tokens.sum() / trace.span_s
    assert tokens_per_s * plan["latency_us"]["decode_step"] * 1e-6 == pytest.approx(64, rel=0.05)
    assert abs(back.cache.min_cache_slots - plan["min_cache_slots"]) <= 3
    assert set(trace.names) <= set(counts.read_text().replace(",", "\n").split())
    lines = (tmp_path / "out" / "commands.sh").read_text().splitlines()
    assert sum(line.startswith("lora-server serve --config plan.yaml") for line in lines) == 1
    served = [line for line in lines if "vllm serve" in line]
    assert len(served) == 2 and "--port 8000" in served[0] and "--port 8001" in served[1]
    assert "layout: " in (tmp_path / "out" / "plan.yaml").read_text()


def test_the_window_of_a_trace_that_is_served_worst_is_named(tmp_path):
    """A tenth of the time, as busy as the rest, calls 60 adapters in place of one."""
    rows = [f"{index * 0.05:.2f},a{index % 60 if 1500 <= index < 1800 else 0},100,100" for index in range(3000)]
    (tmp_path / "t.csv").write_text("timestamp,adapter,input_tokens,output_tokens\n" + "\n".join(rows))
    asked = question(trace=tmp_path / "t.csv", adapters=None, instances=None, batch_size=None)
    result = answer(asked, seeds=0)
    few = replace(disaggregated(result.candidate), cache_slots=5)
    verdict = judge(asked, few, result.candidate.mean_step_us, 2)
    start_s, share = verdict.worst_window
    assert 50 <= start_s <= 90 and share < 0.6
    said = render.load_over_time(replace(result, verified=replace(result.verified, verdict=verdict)))
    assert any(f"from {words.moment(start_s)} after its start: {share:.1%} within" in line for line in said)


def test_the_worst_served_are_named(tmp_path):
    """With two thirds of the slots that the target needs."""
    asked = question(counts=write_counts(tmp_path / "c.csv", "steady", 6))
    result = answer(asked, seeds=0)
    few = replace(disaggregated(result.candidate), cache_slots=asked.cache.min_cache_slots * 2 // 3)
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
    plan = as_json(*asked)
    load, step_s = plan["load"], plan["latency_us"]["decode_step"] * 1e-6
    assert load["request_rate"] == pytest.approx(20, rel=0.01)
    assert load["global_batch"] == pytest.approx(load["request_rate"] * 44.5 * step_s, rel=0.01)
    assert plan["provenance"]["output_tokens"]["kind"] == "measured"
    assert plan["simulation"]["simulated"] and plan["warnings"] == []
    trace.write_text("\n".join(["timestamp,adapter,input_tokens,output_tokens", *lines[:2]]))
    assert "Warning: the trace has 2 requests, too few to bear a plan out" in provision(*asked).stdout
