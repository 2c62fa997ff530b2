"""Popularity, lengths, arrivals and the readers of traces."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from provisioning.inputs import InputError
from provisioning.plan.scenario import Flags, scenario, workload
from provisioning.workload import servegen, traces
from provisioning.workload.counts import read_counts
from provisioning.workload.requests import Lengths, renewal_gaps
from provisioning.workload.workload import Workload, from_counts, zipf

SHARED = Path(__file__).parents[4] / "shared" / "traces"
shared = pytest.mark.skipif(not SHARED.is_dir(), reason="shared/traces is not here")


def test_zipf_and_counts():
    assert zipf(1.0, 4) == pytest.approx(np.array([12, 6, 4, 3]) / 25)
    assert zipf(0, 3) == pytest.approx([1 / 3] * 3)
    assert from_counts({"a": 3, "b": 1}) == pytest.approx([0.75, 0.25])
    with pytest.raises(InputError, match="counts"):
        from_counts([0, 0])


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
    longer = workload(Flags(slo="", model="", counts=tmp_path / name, mean_output_tokens=400.0))
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
    table.write_text(
        "timestamp,adapter,input_tokens,output_tokens\n" + "".join(f"{t},{a},{i},{o}\n" for t, a, i, o in lines)
    )
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
    azure.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
    )
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


def servegen_directory(path):
    """A client with long outputs, one that is off in the busier window and one without lengths that never calls."""
    (path / "chunk-0-trace.csv").write_text("0,2,1,Gamma,1,0.5\n600,4,1,Gamma,1,0.25\n")
    (path / "chunk-1-trace.csv").write_text("0,1,1,Gamma,1,1\n600,0,0,,0,0\n")
    (path / "chunk-2-trace.csv").write_text("0,0,0,,0,0\n600,0,0,,0,0\n")
    empty = {"input_tokens": "{}", "output_tokens": "{}"}
    long = {"input_tokens": "{7: 1.0}", "output_tokens": "{100: 0.25, 300: 0.75}", "reason_ratio": "{0.5: 1.0}"}
    longer = {"output_tokens": "{500: 1.0}"}
    (path / "chunk-0-dataset.json").write_text(json.dumps({"0": long, "600": longer}))
    (path / "chunk-1-dataset.json").write_text(json.dumps({"0": empty, "300": {"output_tokens": {"50": 1.0}}}))
    return path


def test_servegen_has_lengths_and_clients_that_are_off(tmp_path):
    found = traces.load(servegen_directory(tmp_path))
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


def test_servegen_brings_its_own_rate(tmp_path):
    (tmp_path / "chunk-0-trace.csv").write_text("0,2,1,Gamma,1,0.5\n600,4,1,Gamma,1,0.25\n")
    (tmp_path / "chunk-1-trace.csv").write_text("0,1,1,Gamma,1,1\n600,0,0,,0,0\n")
    flags = Flags(slo="ttft_p95=250ms,tpot_avg=100ms", model="mixtral-8x7b", trace=tmp_path)
    found = workload(flags)
    assert found.own_rate == pytest.approx(3.5) and found.peak == pytest.approx(4 / 3.5)
    assert scenario(flags).global_batch == pytest.approx(4 * 256 * 0.1)
    assert scenario(replace(flags, request_rate=7.0)).global_batch == pytest.approx(8 * 256 * 0.1)


def test_a_given_mean_stretches_the_outputs_that_a_trace_replays(tmp_path):
    (tmp_path / "t.csv").write_text("timestamp,adapter,output_tokens\n0,a,10\n1,b,30\n2,a,20\n")
    found = workload(Flags(slo="", model="", trace=tmp_path / "t.csv", mean_output_tokens=100.0))
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


@shared
@pytest.mark.parametrize(("name", "clients", "median"), [("m-small", 43, 20), ("m-mid", 109, 55)])
def test_shared_servegen(name, clients, median):
    found = servegen.load(SHARED / "servegen" / name)
    assert np.median((found.rates > 0).sum(axis=0)) == median  # of all, at any moment
    workload = found.workload()
    assert workload.num_adapters == clients > np.count_nonzero(workload.popularity)
    requests = workload.calls(tokens_per_s=20 * 256, num=10_000, seed=0)
    assert len(requests) / requests.span_s == pytest.approx(20, rel=0.1)
