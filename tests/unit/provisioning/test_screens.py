"""What `provision` prints, as in screens/*.txt; its subcommands; and that it is quick and needs no torch."""

import dataclasses
import io
import json
import os
import re
import resource
import subprocess
import sys
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from lora_server.config import load as config_of
from lora_server.slo import SloClasses
from provisioning.cli import app, main
from provisioning.plan import fronts
from provisioning.plan.flags import PlanFlags
from provisioning.plan.scenario import scenario
from provisioning.report import words
from provisioning.report.fronts import Comparison
from provisioning.simulation.measure import Estimate
from tests.support.doc_commands import SHELL, blocks
from tests.support.processes import python
from tests.support.provision import ASKED, QWEN, SLO, as_json, provision, typed
from tests.support.screens import check_screen, on_terminal
from tests.support.sources import ROOT

SIMULATE = ["simulate", "--cache-slots", "3", "--adapters", "64", "--batch-size", "40", "--requests", "200"]
COMMANDS = {
    "models": ["models", "--lora-rank", "1024"],
    "table4": ["table4"],
    "simulate": SIMULATE,
    "plan": [*ASKED, "--gpu", "h100", "--price-per-gpu-hour", "3", "--no-simulate"],
    "infeasible": [*ASKED, "--max-gpus", "1", "--instances", "99999999", "--no-simulate"],
}
READABLE = {0, 1, 2, 31, 32, 33, 36}  # bold, dim, red, green, yellow, cyan on what the background is
ESCAPE = re.compile(r"\x1b\[([0-9;]*)m")


class Terminal(io.StringIO):
    """Of as many columns as COLUMNS says."""

    def isatty(self):
        return True


def screen(arguments, columns=0, **environment):
    """What stdout gets; without `columns` it is a pipe."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("COLUMNS", "NO_COLOR", "FORCE_COLOR"):
            patch.delenv(name, raising=False)
        for name, value in {"TERM": "xterm-256color", "COLUMNS": str(columns or 80), **environment}.items():
            patch.setenv(name, value)
        patch.setattr("sys.stdout", Terminal() if columns else io.StringIO())
        assert app(arguments, standalone_mode=False, prog_name="provision") in (None, 0, 3)
        return sys.stdout.getvalue()


def plain(text):
    return "".join(f"{line.rstrip()}\n" for line in ESCAPE.sub("", text).splitlines())


@pytest.mark.parametrize("name", COMMANDS)
def test_a_screen_is_its_file_and_says_what_a_pipe_says(name):
    piped = screen(COMMANDS[name])
    assert "\x1b" not in piped and not re.search(r"\de[+-]\d|…|IAR", piped), "spelled out: immediate admission"
    narrow, wide = (screen(COMMANDS[name], columns) for columns in (80, 100))
    for columns, shown in ((80, plain(narrow)), (100, plain(wide))):
        assert Counter(shown.split()) == Counter(piped.split()), "a word is broken"
        assert max(map(len, shown.splitlines())) <= columns
    if name in ("plan", "infeasible"):
        check_colours(narrow)
        check_colours(screen(COMMANDS[name], 80, NO_COLOR="1"), {0, 1, 2})
    check_screen(__file__, name, plain(narrow))


def check_colours(text, allowed=READABLE):
    codes = {int(code) for group in ESCAPE.findall(text) for code in group.split(";") if code}
    assert codes and codes <= allowed, codes


@pytest.mark.long
def test_progress_is_shown_on_a_terminal_alone():
    shown, progress = on_terminal("provisioning", [*SIMULATE[:-1], "2000"], "stderr")
    assert "simulating, run" in progress and shown == screen([*SIMULATE[:-1], "2000"])
    quiet, progress = on_terminal("provisioning", [*SIMULATE, "--json"], "stderr")
    assert progress == "" and json.loads(quiet)


def test_a_real_terminal_shows_the_same_screen_and_raw_json():
    assert on_terminal("provisioning", COMMANDS["models"], "stdout")[0] == screen(COMMANDS["models"], 80)
    shown = screen(["models", "--json"], 80)
    assert "\x1b" not in shown and json.loads(shown)[0]["hidden"] == 2880


@pytest.mark.parametrize(("shown", "expected"), [
    ([words.number(n) for n in (28470.4, 0.49462, 1e-7, 512, 0)], ["28,470", "0.4946", "0.0000001", "512", "0"]),
    ([words.time(us) for us in (369.4, 15_240, 1.72e8)], ["369 us", "15.2 ms", "172 s"]),
    (words.times(Estimate(mean=0.0301, low=0.0299, high=0.0303)), "30.1 ms [29.9, 30.3]"),
    ([words.size(nbytes) for nbytes in (1.69 * 2**30, 300)], ["1.69 GiB", "300 bytes"]),
    ([words.count(num, "GPU") for num in (1, 1024)], ["1 GPU", "1,024 GPUs"]),
    ([words.moment(s) for s in (90, 750, 22_500, 302_400)], ["90 s", "12.5 min", "6.25 h", "3.5 days"]),
    ([words.sparkline([0, 1, 2, 4]), len(words.sparkline(list(range(1000)))) <= 48], ["▁▃▅█", True]),
], ids=str)  # fmt: skip
def test_numbers(shown, expected):
    assert shown == expected


def examples():
    """(document, the command of a shell block, the text block after it) where that is a plan's."""
    for document in ("README.md", "docs/provisioning.md"):
        found = blocks(document)
        for block, after in pairwise(found):
            asked = [line for line in block.commands if line.startswith("provision --slo")]
            if block.language in SHELL and asked and after.language == "text":
                yield document, asked[0], after.text


@pytest.mark.long
@pytest.mark.parametrize(("document", "command", "text"), list(examples()), ids=lambda value: value[:40])
def test_documents_print_what_the_command_says(document, command, text, tmp_path):
    typed = re.sub(r"^provision", f"{sys.executable} -m provisioning", command)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    options = {"cwd": tmp_path, "env": environment, "timeout": 120}
    done = subprocess.run(typed, shell=True, capture_output=True, text=True, **options)
    said = " ".join(done.stdout.split())
    for part in text.split("...\n"):
        assert " ".join(part.split()) in said, said


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
    found = {one["name"]: one for one in as_json(*classes)["classes"]}
    assert {name: one["adapters"] for name, one in found.items()} == {"gold": 100, "fast": 2, "hasty": 1, "others": 197}
    assert {name: one["fails"] for name, one in found.items()} == {
        "gold": ["admission"], "fast": ["tpot"], "hasty": ["ttft"], "others": [],
    }  # fmt: skip
    assert found["hasty"]["share_within_ttft"] == 0 and found["others"]["share_within_ttft"] > 0.95
    assert 0.5 < found["gold"]["share_within_ttft"] < 0.999 and found["gold"]["worst"][0][0].startswith("adapter-2")


def test_a_plan_says_which_classes_it_meets_and_gives_them_to_the_server(classes, tmp_path):
    out = tmp_path / "plan.yaml"
    text = " ".join(provision(*classes, "--no-simulate", "--out", out).output.split())
    assert config_of({"base_model": "mixtral-8x7b"}, out).classes == SloClasses.read(tmp_path / "classes.yaml")
    assert "Class gold, 100 adapters: met." in text and "Class fast, 2 adapters: FAILS tpot (a step takes" in text


@pytest.mark.long
def test_every_line_of_a_comparison(tmp_path):
    plot, report = tmp_path / "compare.svg", tmp_path / "compare.html"
    asked = [*typed(**COMPARED), "--plot", plot, "--report", report, "--price-per-gpu-hour", "2"]
    said = as_json("compare", *asked)
    assert list(said["fronts"]) == ["coupled", "disaggregated", "8-bit wire", "hot-merged", "merged base"]
    gpus = {line: [point and point["gpus"] for point in points] for line, points in said["fronts"].items()}
    assert said["rates"][said["asked"]] == 40 and all(len(points) == 9 for points in gpus.values())
    for line, points in gpus.items():
        known = [one for one in points if one is not None]
        assert known and known == sorted(known), f"{line}: more requests never cost fewer GPUs"
    assert all(narrow <= ours for narrow, ours in zip(gpus["8-bit wire"], gpus["disaggregated"], strict=True))
    assert f", {min(one[4] for one in gpus.values())} GPUs" in said["answer"]
    assert plot.read_text().startswith("<?xml") and "disaggregated" in report.read_text()
    assert "`provision glossary`" in provision("compare", *typed(**COMPARED, zipf=1)).output


@pytest.mark.parametrize(("hottest", "said"), [(0.24, "costs"), (0.8, "saves")])
def test_a_comparison_says_what_a_merge_costs_of_each_resource(hottest, said):
    found = Comparison(question="", command="", date="", rates=(1.0,), asked=0, fronts={}, hottest=hottest)
    (note,) = (note for note in found.notes if note.startswith(f"Merged base {said} compute and saves wire here"))
    assert f"computes {2 - 2 * hottest:.2f} of the entries" in note
    assert f"carry {1 - hottest:.2f} of the bytes" in note


@pytest.mark.long
def test_a_budget_is_kept_and_more_buys_more():
    asked = scenario(PlanFlags(**COMPARED))
    for line in ("coupled", "disaggregated"):
        few, many = (fronts.within(line, asked, budget, [1]) for budget in (4, 8))
        assert few.gpus <= 4 and many.gpus <= 8 and many.rate > 1.3 * few.rate
        more = fronts.at_sizes(fronts.LINES[line], asked.scaled(many.rate * 1.05 / 40), [1])
        assert more is None or more.gpus > 8, "it is the most, to 2 %"
    assert fronts.within("disaggregated", asked, 1, [1]) is None


def test_merged_adapters_leave_the_others_their_share_of_the_load():
    found = fronts.hot_merged(scenario(PlanFlags(**COMPARED, zipf=1.6)))
    assert "merged on" in found.how and found.gpus >= 3 and found.rate == 40.0


@pytest.mark.parametrize("hottest", [0.2, 0.5, 0.8])
def test_a_merged_base_sends_the_other_rows_once_and_computes_two_entries_of_each(hottest):
    others = np.full(4, (1 - hottest) / 4)
    model = dataclasses.replace(scenario(PlanFlags(**COMPARED)).model, popularity=np.array([*others, hottest]))
    plain, merged = model.work.step(64, 2), fronts.with_merged(model).work.step(64, 2)
    assert merged.receive == pytest.approx((1 - hottest) * plain.receive)
    assert merged.send == pytest.approx((1 - hottest) * plain.send)
    assert merged.flops == pytest.approx(2 * (1 - hottest) * plain.flops)
    alone, both = (dataclasses.replace(model, popularity=np.ones(1), merged_share=one) for one in (0.0, hottest))
    assert both.prompt(2).lora.compute.value == pytest.approx(2 * (1 - hottest) * alone.prompt(2).lora.compute.value)


def test_a_merged_base_takes_fewer_gpus_where_one_adapter_has_most_requests():
    asked = scenario(PlanFlags(**COMPARED | {"request_rate": 160.0}, zipf=3.0))
    assert fronts.merged_base(asked).gpus < fronts.disaggregated(asked).gpus


def test_simulate():
    options = typed(cache_slots=30, adapters=64, zipf=1, batch_size=40, requests=4000, seeds=3)
    found = as_json("simulate", *options)
    assert set(found["model_iar"]) == {"literal", "offered", "queued"}
    low, high = found["simulated"]["immediate_rate"]["interval"]
    assert low <= found["simulated"]["immediate_rate"]["mean"] <= high
    assert as_json("simulate", *options, "--mode", "coupled")


def test_models_table4_and_glossary_are_said_as_json():
    assert {row["name"] for row in as_json("models")} >= {"mixtral-8x7b", "dbrx"}
    assert len(as_json("table4")) == 32
    assert "visible load" in provision("glossary").output and "Eq. 5" in as_json("glossary")


@pytest.mark.long
def test_almost_no_bursts_are_a_metronome():
    plan = as_json(*ASKED, "--burst-cv", "1e-200", "--max-gpus", "2")
    assert plan["feasible"] and plan["simulation"]["holds_target"]


@pytest.mark.long
def test_a_full_plan_imports_no_torch(tmp_path):
    done = python(
        "-c",
        "import sys\nfrom provisioning.cli import app\n"
        f"app({[*ASKED, '--json', '--report', str(tmp_path / 'r.html')]!r}, standalone_mode=False)\n"
        "roots = {name.partition('.')[0] for name in sys.modules}\n"
        "bad = sorted(roots & {'torch', 'client_connector', 'kernels_cuda'})\n"
        "ours = sorted(name for name in sys.modules if name.startswith('lora_server.'))\n"
        "print(bad, ours, file=sys.stderr)",
    )
    assert done.returncode == 0, done.stderr
    leaves = "['lora_server.errors', 'lora_server.placement', 'lora_server.slo', 'lora_server.spec']"
    assert done.stderr.splitlines()[-1] == f"[] {leaves}"
    json.loads(done.stdout)


def test_a_plan_without_simulation_is_quick():
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    code = f"from provisioning.cli import app; app({[*ASKED, '--no-simulate', '--model', 'dbrx']!r})"
    run = python("-c", code)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert run.returncode == 0, run.stderr
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 4  # CPU seconds; the bar is 1
    assert "`provision glossary`" in run.stdout and "Prompts, 896 tokens a request" in run.stdout


def test_without_arguments_it_says_how_to_use_it(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["provision"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0 and "Usage" in capsys.readouterr().out
