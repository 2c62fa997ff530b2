"""Classes, `compare`, `simulate`, `models`, `table4`, `glossary`; and that the command is quick and needs no torch."""

import json
import resource
import subprocess
import sys

import pytest

from provisioning.plan import fronts
from provisioning.plan.scenario import Flags, scenario
from tests.support.provision import ASKED, QWEN, SLO, provision, typed

COMPARED = {"slo": SLO, "model": "gpt-oss-20b", "gpu": "h100", "adapters": 300, "request_rate": 40.0}
CLASSES = """
gold: {slo: "ttft_p99.9=250ms,tpot_avg=100ms", adapters: ["adapter-2[0-9][0-9]"]}
fast: {slo: "ttft_p90=250ms,tpot_avg=5ms", adapters: ["adapter-1", adapter-2]}
hasty: {slo: "ttft_p90=2ms,tpot_avg=100ms", adapters: [adapter-3]}
"""


@pytest.fixture
def classes(tmp_path):
    """A question whose adapters have classes: of the tail, of two hot ones, and of one."""
    (tmp_path / "classes.yaml").write_text(CLASSES)
    return [*ASKED, *typed(**QWEN, adapters=300, zipf=0.8), "--classes", tmp_path / "classes.yaml"]


@pytest.mark.long
def test_each_class_is_held_to_its_own(classes):
    """Nearly all of the tail are to be in time, two hot ones a step, one its TTFT; all others have --slo."""
    done = provision(*classes, "--json")
    assert done.exit_code == 0, done.output
    found = {one["name"]: one for one in json.loads(done.stdout)["classes"]}
    assert {name: one["adapters"] for name, one in found.items()} == {"gold": 100, "fast": 2, "hasty": 1, "others": 197}
    assert {name: one["fails"] for name, one in found.items()} == {
        "gold": ["admission"], "fast": ["tpot"], "hasty": ["ttft"], "others": [],
    }  # fmt: skip
    assert found["hasty"]["share_within_ttft"] == 0 and found["others"]["share_within_ttft"] > 0.95
    assert 0.5 < found["gold"]["share_within_ttft"] < 0.999 and found["gold"]["worst"][0][0].startswith("adapter-2")


def test_a_plan_says_which_classes_it_meets(classes):
    text = " ".join(provision(*classes, "--no-simulate").output.split())
    assert "Class gold, 100 adapters: met." in text and "Class fast, 2 adapters: FAILS tpot (a step takes" in text


@pytest.mark.long
def test_every_line_of_a_comparison(tmp_path):
    plot, report = tmp_path / "compare.svg", tmp_path / "compare.html"
    asked = [*typed(**COMPARED), "--plot", plot, "--report", report, "--price-per-gpu-hour", "2", "--json"]
    found = provision("compare", *asked)
    assert found.exit_code == 0, found.output
    said = json.loads(found.stdout)
    assert list(said["fronts"]) == ["coupled", "disaggregated", "8-bit wire", "hot-merged"]
    gpus = {line: [point and point["gpus"] for point in points] for line, points in said["fronts"].items()}
    assert said["rates"][said["asked"]] == 40 and all(len(points) == 9 for points in gpus.values())
    for line, points in gpus.items():
        known = [one for one in points if one is not None]
        assert known and known == sorted(known), f"{line}: more requests never cost fewer GPUs"
    assert all(narrow <= ours for narrow, ours in zip(gpus["8-bit wire"], gpus["disaggregated"], strict=True))
    assert min(one[4] for one in gpus.values()) == int(said["answer"].split(": ")[1].split()[0])
    assert plot.read_text().startswith("<?xml") and "disaggregated" in report.read_text()
    assert "`provision glossary`" in provision("compare", *typed(**COMPARED, zipf=1)).output


@pytest.mark.long
def test_a_budget_is_kept_and_more_buys_more():
    asked = scenario(Flags(**COMPARED))
    for line in ("coupled", "disaggregated"):
        few, many = (fronts.within(line, asked, budget, [1]) for budget in (4, 8))
        assert few.gpus <= 4 and many.gpus <= 8 and many.rate > 1.3 * few.rate
        more = fronts.at_sizes(fronts.LINES[line], asked.scaled(many.rate * 1.05 / 40), [1])
        assert more is None or more.gpus > 8, "it is the most, to 2 %"
    assert fronts.within("disaggregated", asked, 1, [1]) is None


def test_merged_adapters_leave_the_others_their_share_of_the_load():
    found = fronts.hot_merged(scenario(Flags(**COMPARED, zipf=1.6)))
    assert "merged on" in found.how and found.gpus >= 3 and found.rate == 40.0


def test_simulate():
    options = [*typed(cache_slots=30, adapters=64, zipf=1, batch_size=40, requests=4000, seeds=3), "--json"]
    outcome = provision("simulate", *options)
    assert outcome.exit_code == 0, outcome.output
    found = json.loads(outcome.stdout)
    assert set(found["model_iar"]) == {"literal", "offered", "queued"}
    low, high = found["simulated"]["immediate_rate"]["interval"]
    assert low <= found["simulated"]["immediate_rate"]["mean"] <= high
    assert provision("simulate", *options, "--mode", "coupled").exit_code == 0


def test_models_table4_and_glossary():
    rows = json.loads(provision("models", "--json").stdout)
    assert {row["name"] for row in rows} >= {"mixtral-8x7b", "qwen3-30b-a3b", "dbrx"}
    assert len(json.loads(provision("table4", "--json").stdout)) == 32
    assert "visible load" in provision("glossary").output
    assert "Eq. 5" in json.loads(provision("glossary", "--json").output)


@pytest.mark.long
def test_almost_no_bursts_are_a_metronome():
    plan = json.loads(provision(*ASKED, "--burst-cv", "1e-200", "--max-gpus", "2", "--json").stdout)
    assert plan["feasible"] and plan["simulation"]["holds_target"]


def python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


@pytest.mark.long
def test_a_full_plan_imports_no_torch(tmp_path):
    done = python(
        "import sys\nfrom provisioning.cli import app\n"
        f"app({[*ASKED, '--json', '--report', str(tmp_path / 'r.html')]!r}, standalone_mode=False)\n"
        "roots = {name.partition('.')[0] for name in sys.modules}\n"
        "bad = sorted(roots & {'torch', 'client_connector', 'kernels_cuda'})\n"
        "ours = sorted(name for name in sys.modules if name.startswith('lora_server.'))\n"
        "print(bad, ours, file=sys.stderr)"
    )
    assert done.returncode == 0, done.stderr
    leaves = "['lora_server.errors', 'lora_server.placement', 'lora_server.spec']"
    assert done.stderr.splitlines()[-1] == f"[] {leaves}"
    json.loads(done.stdout)


def test_help_imports_no_numpy_and_a_plan_without_simulation_is_quick():
    done = python("import sys, provisioning.cli; print('numpy' in sys.modules, 'torch' in sys.modules)")
    assert done.stdout == "False False\n"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    run = python(f"from provisioning.cli import app; app({[*ASKED, '--no-simulate', '--model', 'dbrx']!r})")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert run.returncode == 0, run.stderr
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 4  # CPU seconds; the bar is 1
    assert "`provision glossary`" in run.stdout and "Prefill, estimated" in run.stdout
    bare = python("import sys; sys.argv[:] = ['provision']; from provisioning.cli import main; main()")
    assert bare.returncode == 0 and "Usage" in bare.stdout
