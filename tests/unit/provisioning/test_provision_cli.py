"""The command: bad input in one line and in bounded time, no torch, and what the sub-commands answer."""

import json
import resource
import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner

from provisioning.cli import app

BASE = ["--slo", "ttft_p95=250ms,tpot_avg=100ms", "--model", "mixtral-8x7b", "--adapters", "512", "--zipf", "1.2"]
LOAD = ["--instances", "4", "--batch-size", "64"]
SIMULATE = ["simulate", "--cache-slots", "30", "--adapters", "64", "--zipf", "1", "--batch-size", "40"]


def provision(*arguments: str):
    return CliRunner().invoke(app, list(arguments))


@pytest.mark.parametrize(
    "bad",
    [
        ("--slo", "ttft_p95=250"),
        ("--slo", "ttft_p95=250ms"),
        ("--slo", "ttft_avg=1s,tpot_avg=1s"),
        ("--slo", "ttft_p0=1s,tpot_avg=1s"),
        ("--slo", "ttft_p95=1s,ttft_p99=1s,tpot_avg=1s"),
        ("--slo", "ttft_p95=-1s,tpot_avg=1s"),
        ("--model", "nope"),
        ("--gpu", "abacus"),
        ("--adapters", "0"),
        ("--zipf", "-1"),
        ("--zipf", "nan"),
        ("--iar", "0"),
        ("--iar", "1.01"),
        ("--batch-size", "0"),
        ("--batch-size", "inf"),
        ("--instances", "0"),
        ("--lora-rank", "0"),
        ("--request-rate", "5"),
        ("--max-gpus", "0"),
        ("--link-gbps", "0"),
        ("--burst-cv", "-1"),
        ("--seeds", "4"),
        ("--price-per-gpu-hour", "-2"),
        ("--trace", "/absent.csv"),
        ("--counts", "/absent.json"),
        ("--profile", "/absent.json"),
        ("--out", "/absent/plan.yaml"),
        ("--report", "/absent/plan.html"),
        ("--gpus-per-node", "0"),
        ("--context-tokens", "0"),
        ("--gpu-memory-gib", "0"),
        ("--instance-gpus", "0"),
        ("--seed", "-1"),
        ("--adapters", "9999999"),
        ("--burst-cv", "1e3"),
        ("--gpu-memory-gib", "1e-9"),
        ("--gpu-memory-gib", "1e300"),
        ("--instances", "10000000000"),
        ("--mean-output-tokens", "1e300"),
        ("--dispatch", "all"),
        ("--eq6", "5"),
        ("--base-dtype", "int1"),
        ("--coupled-split", "half"),
        ("--coupled-split", "1.5"),
        ("--prefill-tokens", "-1"),
    ],
)
def test_bad_flags_are_one_line_and_exit_2(bad):
    outcome = provision(*BASE, *LOAD, *bad)
    assert outcome.exit_code == 2, outcome.output
    assert outcome.stdout == ""
    assert outcome.stderr.count("\n") == 1
    assert outcome.stderr.startswith(f"error: {bad[0]}")


def console(*arguments: str) -> subprocess.CompletedProcess[str]:
    code = "import sys; sys.argv[0] = 'provision'; from provisioning.cli import main; main()"
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("bad", [["--adapters", "many"], ["--nonsense", "1"], ["--model"], ["solve"]])
def test_usage_errors_are_one_line_too(bad):
    outcome = console(*BASE, *LOAD, *bad)
    assert outcome.returncode == 2
    assert outcome.stderr.count("\n") == 1 and bad[0] in outcome.stderr


def test_no_torch_even_after_a_full_plan(tmp_path):
    code = (
        "import sys\nfrom provisioning.cli import app\n"
        f"app({[*BASE, *LOAD, '--json', '--report', str(tmp_path / 'r.html')]!r}, standalone_mode=False)\n"
        "roots = {name.partition('.')[0] for name in sys.modules}\n"
        "bad = sorted(roots & {'torch', 'client_connector', 'kernels_cuda'})\n"
        "ours = sorted(name for name in sys.modules if name.startswith('lora_server.'))\n"
        "print(bad, ours, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    leaves = "['lora_server.errors', 'lora_server.placement', 'lora_server.spec']"
    assert done.stderr.splitlines()[-1] == f"[] {leaves}"
    json.loads(done.stdout)


def test_help_is_quick_and_imports_no_numpy():
    code = "import sys, provisioning.cli; print('numpy' in sys.modules, 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False False\n"
    assert console("--help").returncode == 0
    assert console().returncode == 0


def test_no_simulate_is_quick():
    def spent() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    before = spent()
    assert console(*BASE, *LOAD, "--no-simulate", "--model", "dbrx").returncode == 0
    assert spent() - before < 4  # of a CPU, whoever else is on it; the bar is 1 s


def test_simulate_command():
    options = [*SIMULATE, "--requests", "4000", "--seeds", "3"]
    outcome = provision(*options, "--json")
    assert outcome.exit_code == 0, outcome.output
    found = json.loads(outcome.stdout)
    assert set(found["model_iar"]) == {"literal", "offered", "queued"}
    low, high = found["simulated"]["immediate_rate"]["interval"]
    assert low <= found["simulated"]["immediate_rate"]["mean"] <= high
    assert provision(*options, "--mode", "coupled").exit_code == 0


@pytest.mark.parametrize(
    "bad",
    [
        ("--mode", "both"),
        ("--order", "lifo"),
        ("--requests", "1"),
        ("--requests", "100000000000"),
        ("--instances", "99999999"),
        ("--step-ms", "0"),
        ("--load-ms", "1e300"),
        ("--dispatch", "all"),
    ],
)
def test_bad_flags_of_simulate(bad):
    outcome = provision(*SIMULATE, *bad)
    assert outcome.exit_code == 2 and outcome.stderr.startswith(f"error: {bad[0]}"), outcome.output


@pytest.mark.parametrize(
    "odd",
    [
        (*LOAD, "--instances", "99999999"),
        (*LOAD, "--max-gpus", "1024"),
        (*LOAD, "--lora-rank", "1000000000"),
        ("--request-rate", "1e9"),
        ("--request-rate", "1e-9"),
    ],
)
def test_what_no_cluster_could_serve_is_infeasible_in_bounded_time(odd):
    start = time.process_time()
    assert provision(*BASE, *odd, "--no-simulate").exit_code in (0, 3)
    assert time.process_time() - start < 20  # 0.2 s on a machine of one's own


def test_almost_no_bursts_are_a_metronome():
    plan = json.loads(provision(*BASE, *LOAD, "--burst-cv", "1e-200", "--max-gpus", "2", "--json").stdout)
    assert plan["feasible"] and plan["simulation"]["holds_target"]


def test_models_command():
    rows = json.loads(provision("models", "--json").stdout)
    assert {row["name"] for row in rows} >= {"mixtral-8x7b", "qwen3-30b-a3b", "dbrx"}
    assert provision("models").exit_code == 0


def test_table4_command_prints_residuals():
    assert "%*" in provision("table4").stdout
    assert len(json.loads(provision("table4", "--json").stdout)) == 32
