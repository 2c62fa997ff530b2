"""Bad input of `provision` and its files: one line that names the flag and the file, exit status 2, bounded time."""

import time

import pytest

from provisioning.cli import main
from provisioning.inputs import InputError
from provisioning.model import profile
from provisioning.plan.flags import PlanFlags
from provisioning.plan.scenario import workload
from provisioning.workload import traces
from provisioning.workload.counts import read_counts
from tests.support.provision import ASKED, SLO, check_refused, provision, question, typed, write

SIMULATE = ["simulate", "--cache-slots", "30", "--adapters", "64", "--zipf", "1", "--batch-size", "40"]
COMPARE = ["compare", *typed(slo=SLO, model="gpt-oss-20b", gpu="h100", adapters=300, request_rate=40)]
DEEP = "[" * 200_000
OF = '"of": {"model": "m", "gpu": "h200", "lora_rank": 64, "wire": "exact", "transport": "gpu"}'

BAD_FLAGS = {
    "--slo": [
        "ttft_p95=250", "ttft_p95=250ms", "ttft_avg=1s,tpot_avg=1s", "ttft_p0=1s,tpot_avg=1s",
        "ttft_p95=1s,ttft_p99=1s,tpot_avg=1s", "ttft_p95=-1s,tpot_avg=1s",
    ],
    "--model": ["nope"], "--gpu": ["abacus"], "--base-dtype": ["int1"], "--lora-rank": ["0"],
    "--adapters": ["0", "9999999"], "--zipf": ["-1", "nan"], "--iar": ["0", "1.01"],
    "--instances": ["0", "10000000000"], "--batch-size": ["0", "inf"], "--request-rate": ["5"],
    "--mean-output-tokens": ["1e300"], "--context-tokens": ["0"], "--prefill-tokens": ["-1"],
    "--burst-cv": ["-1", "1e3"], "--max-gpus": ["0"], "--gpus-per-node": ["0"], "--instance-gpus": ["0"],
    "--link-gbps": ["0"], "--transport": ["auto", "pigeon"], "--prefill": ["both"], "--prompt-tokens": ["-1", "inf"],
    "--gpu-memory-gib": ["0", "1e-9", "1e300"], "--seed": ["-1"], "--seeds": ["4"], "--price-per-gpu-hour": ["-2"],
    "--dispatch": ["all"], "--eq6": ["5"], "--coupled-split": ["half", "1.5"], "--window": ["60"],
    "--trace": ["/absent.csv"], "--counts": ["/absent.json"], "--profile": ["/absent.json"],
    "--out": ["/absent/plan.yaml"], "--report": ["/absent/plan.html"],
}  # fmt: skip
BAD_SIMULATE_FLAGS = {
    "--mode": ["both"], "--order": ["lifo"], "--requests": ["1", "100000000000"], "--instances": ["99999999"],
    "--step-ms": ["0"], "--load-ms": ["1e300"], "--dispatch": ["all"],
}  # fmt: skip
BAD_COMPARE_FLAGS = {
    "--sizes": ["1,x"], "--budget": ["0"], "--instances": ["3"], "--nonsense": ["3"], "--plot": ["x.pdf"],
}  # fmt: skip


@pytest.mark.parametrize(("command", "flag", "value"), [
    (command, flag, value)
    for command, flags in ((ASKED, BAD_FLAGS), (SIMULATE, BAD_SIMULATE_FLAGS), (COMPARE, BAD_COMPARE_FLAGS))
    for flag, values in flags.items()
    for value in values
], ids=lambda value: value[0] if isinstance(value, list) else value)  # fmt: skip
def test_a_bad_flag_is_one_line(command, flag, value):
    found = provision(*command, flag, value)
    check_refused(found, flag)
    assert found.stderr.startswith(f"error: {flag}") or command is COMPARE


@pytest.mark.parametrize("bad", [["--adapters", "many"], ["--nonsense", "1"], ["--model"], ["solve"]], ids="".join)
def test_a_usage_error_of_the_console_script_is_one_line(monkeypatch, capsys, bad):
    monkeypatch.setattr("sys.argv", ["provision", *ASKED, *bad])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr()
    assert (ended.value.code, said.out, said.err.count("\n")) == (2, "", 1) and bad[0] in said.err


@pytest.mark.parametrize("odd", [
    typed(instances=99999999),
    typed(max_gpus=1024),
    pytest.param(typed(lora_rank=1000000000), marks=pytest.mark.long),
    pytest.param(typed(request_rate=1e9), marks=pytest.mark.long),
    typed(request_rate=1e-9),
], ids="".join)  # fmt: skip
def test_a_load_that_no_cluster_could_serve_is_infeasible_in_bounded_time(odd):
    start = time.process_time()
    asked = typed(slo=SLO, model="mixtral-8x7b", adapters=512) if "--request-rate" in odd else ASKED
    assert provision(*asked, *odd, "--no-simulate").exit_code in (0, 3)
    assert time.process_time() - start < 20  # 0.2 s on an idle machine


# -- files: text -> what is said of it

BAD_FILES = {
    ("--counts", "c.json"): {
        "[true, 1]": "got True",
        '[{"count": 1, "mean_output_tokens": 9}, 3]': "of 1 of 2 adapters; give all or none",
        '[{"count": 1, "mean_output_tokens": 0}]': "mean_output_tokens of 0: got 0",
        '[{"count": 1, "mean_output_tokens": true}]': "mean_output_tokens of 0: got True",
        '{"law": {"calls": 1}}': "'law': got calls, expected such as",
        '{"law": {}}': "'law': got nothing",
        '["3", 1]': "got '3'",
        '{"law": null}': "count of 'law': got None",
        '{"law": 3, "law": 1}': "'law' is counted twice",
        '{"law": -3, "code": 1}': "weight 0 is -3.0",
        "[NaN]": "weight 0 is nan",
        "[1e999]": "weight 0 is inf",
        "[]": "holds no counts",
        "7": "got int",
        "{": "is not JSON",
        DEEP: "nested too deeply",
        "[1" + "0" * 400 + "]": "too large",
    },
    ("--counts", "c.csv"): {
        "law,3,0\n": "line 1: got 0.0",
        "adapter,count,tokens\nlaw,3,many\n": "line 2: got 'many', expected a number of tokens",
        "law,3,1\ncode,3\n": "line 2: got 'code,3'",
        "law,3\nlaw,1\n": "'law' is counted twice",
        "law,many\n": "holds no counts",
        "law,3O\ncode,1\n": "line 1: got '3O'",
        "name,calls\nlaw,true\n": "line 2: got 'true'",
        "law,-3\ncode,1\n": "weight 0 is -3.0",
        "law,0\n": "all 1 weights are zero",
        "law,3,1,2\n": "line 1: got 'law,3,1,2'",
        "law,3\n4\n": "line 2: got '4'",
        ",3\n": "line 1: got ',3'",
        "\n \n": "holds no counts",
    },
    ("--trace", "a.csv"): {
        "": "no requests",
        "timestamp,output_tokens\n": "no requests",
        "when,output_tokens\n1,2\n": "line 2: no timestamp",
        "timestamp,tokens\n1,2\n": "line 2: no output tokens",
        "timestamp,output_tokens\n1,2\nx,2\n": "line 3: timestamp",
        "timestamp,output_tokens\nnan,2\n": "line 2: timestamp",
        "timestamp,output_tokens\n1,-2\n": "line 2: output tokens",
        "timestamp,output_tokens\n1,2\n2,99999999999999999999\n": "line 3: output tokens",
        "timestamp,output_tokens\n1,2,3\n": "line 2: the number of columns",
        "timestamp,output_tokens\n1\n": "line 2: the number of columns",
        "timestamp,adapter,output_tokens\n1,,3\n": "line 2: the adapter is empty",
        "timestamp,output_tokens\n1,2\n1,2\n": "2 request(s) have one timestamp",
        "timestamp,output_tokens\n1,2\n": "1 request(s) have one timestamp",
        "timestamp,output_tokens\n0,2\n1e300,2\n": "timestamps from 0 to 1e+300 s, expected at most 1e+09 s",
    },
    ("--trace", "a.jsonl"): {
        "{}\n": "line 1: no timestamp",
        "[1]\n": "line 1: got list",
        '{"timestamp": 1, "output_tokens": 2}\n{\n': "line 2 is not JSON",
        DEEP: "line 1 is nested too deeply",
    },
    ("--trace", "chunk-0-trace.csv"): {
        "0,2,1,Gamma,0,0.5\n": "shape and scale above 0",
        "0,2,1,Gamma,1,-0.5\n": "0 or more",
        "0,2,1,Pareto,1,0.5\n": "Gamma or Weibull",
        "0,2,1,,1,0.5\n": "Gamma or Weibull",
        "0,2,1,Gamma,inf,0.5\n": "finite",
        "0,2,1,Weibull,0.001,0.5\n": "larger shape",
        "0,2,1,Gamma,1,0.5\n0,3,1,Gamma,1,0.5\n": "not after",
        "600,2,1,Gamma,1,0.5\n0,3,1,Gamma,1,0.5\n": "not after",
        "0,2,1,Gamma,1,0.5\n600,1.0\n": "line 2",
        "\udcff\udcfe0,1,1": "chunk-0-trace",
    },
    ("--trace", "chunk-1-trace.csv"): {"0,0,0,,0,0\n": "has other windows"},
    ("--trace", "chunk-0-dataset.json"): dict.fromkeys(
        ["[]", "{", '{"0": {}}', '{"start": {"output_tokens": "{1: 1.0}"}}']
        + [f'{{"0": {{"output_tokens": {bad}}}}}' for bad in ('"12: 1"', '"{12}"', '"{-1: 1.0}"', '"{1: -1.0}"', "7")],
        "",
    ),
    ("--profile", "p.json"): dict.fromkeys(
        ["{", "[]", '{"terms": {}}', '{"terms": {}, "of": {"gpu": "h200"}}', DEEP]
        + [f'{{{OF}, "terms": {terms}}}' for terms in ('{"recv": []}', '{"base_ffn": [{"batch": 64, "us": 0}]}')]
        + [f'{{{OF}, "terms": {{"send": [{{"ep": {row}, "us": 3}}]}}}}' for row in ("1", '1, "batch": 0')]
        + [f'{{{OF}, "terms": {{"send": [{{"ep": {ep}, "batch": 1, "us": 3}}]}}}}' for ep in ("1e400", "1.5")],
        "",
    ),
}
READERS = {"--counts": read_counts, "--profile": profile.load, "--trace": traces.load}


@pytest.mark.parametrize(
    ("flag", "name", "text", "said"),
    [(*key, text, said) for key, rows in BAD_FILES.items() for text, said in rows.items()],
    ids=lambda value: ascii(value[:30]),
)
def test_a_bad_file_is_one_line_that_names_the_flag_and_the_file(tmp_path, flag, name, text, said):
    file = tmp_path / name
    if "chunk" in name:
        (tmp_path / "chunk-0-trace.csv").write_text("0,2,1,Gamma,1,0.5\n600,4,1,Gamma,1,0.25\n")
    file.write_text(text, errors="surrogateescape")
    with pytest.raises(InputError) as caught:
        READERS[flag](tmp_path if "chunk" in name else file)
    assert str(caught.value).startswith(f"{flag}: {file}") and said in str(caught.value)
    assert "\n" not in str(caught.value)
    if name == "chunk-0-trace.csv" and text.endswith("\n"):
        assert f"line {text.count(chr(10))}" in str(caught.value), "its last line is the bad one"


def test_a_file_that_cannot_be_read_is_one_line_of_the_command_too(tmp_path):
    (tmp_path / "same.csv").write_text("timestamp,adapter,input_tokens,output_tokens\n1,a,1,1\n1,b,1,1\n")
    check_refused(provision("simulate", "--cache-slots", "1", "--trace", tmp_path / "same.csv"), "--trace")
    for read in (read_counts, traces.load, profile.load):
        with pytest.raises(InputError, match="/absent"):
            read(tmp_path / "absent")


@pytest.mark.parametrize(("text", "says"), [
    ("- gold", "got list, expected a name"),
    ("gold: fast", "gold: got 'fast', expected a name"),
    ("gold: {slo: x, adapters: [adapter-1]}", "gold: got 'x'"),
    ('gold: {slo: "ttft_p9=1s,tpot_avg=1s", adapters: [law]}', "no adapter is called 'law'; they are called such as"),
    ('gold: {slo: "ttft_p9=1s,tpot_avg=1s", adapters: []}', "expected a list of names or patterns"),
    ('a: {slo: "ttft_p9=1s,tpot_avg=1s", adapters: [adapter-1]}\nb: {slo: "ttft_p9=1s,tpot_avg=1s", adapters: ["*"]}',
     "'adapter-1' is in a and b; name it in one"),
    ("gold: [", "cannot be read"),
])  # fmt: skip
def test_bad_classes_are_one_line(tmp_path, text, says):
    (tmp_path / "classes.yaml").write_text(text)
    check_refused(provision(*ASKED, "--classes", tmp_path / "classes.yaml", "--no-simulate"), says)


@pytest.mark.parametrize("arguments", [
    ["--trace", "servegen", "--adapters", "512"],
    ["--trace", "named.csv", "--zipf", "1"],
    ["--trace", "named.csv", "--burst-cv", "3"],
    ["--counts", "c.csv", "--zipf", "1"],
], ids=" ".join)  # fmt: skip
def test_flags_that_a_file_answers_are_refused(tmp_path, arguments):
    (tmp_path / "servegen").mkdir()
    (tmp_path / "servegen" / "chunk-0-trace.csv").write_text("0,2,1,Gamma,1,0.5\n")
    (tmp_path / "named.csv").write_text("timestamp,adapter,output_tokens\n0,a,9\n1,b,9\n")
    (tmp_path / "c.csv").write_text("a,1\n")
    given = {arguments[0][2:]: tmp_path / arguments[1], arguments[2][2:].replace("-", "_"): float(arguments[3])}
    blamed = "--counts" if "--counts" in arguments else arguments[2]
    with pytest.raises(InputError, match=f"^{blamed}: "):
        workload(PlanFlags(slo="", model="", **given))


@pytest.mark.parametrize("window", [0.0, -1.0, 1e-9, float("nan")])
def test_a_bad_window_is_refused(tmp_path, window):
    with pytest.raises(InputError, match=r"^--window: "):
        question(adapters=None, trace=write(tmp_path / "t.csv", "steady", 5, num=50), window=window)
