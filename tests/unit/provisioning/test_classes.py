"""SLO classes: which of them a plan fails, by what, and who of them is served worst."""

import json

import pytest
from typer.testing import CliRunner

from provisioning.cli import app

ASKED = [
    "--slo", "ttft_p95=250ms,tpot_avg=100ms", "--model", "qwen3-30b-a3b", "--lora-rank", "32", "--gpu", "hopper-96",
    "--adapters", "300", "--zipf", "0.8", "--instances", "4", "--batch-size", "64",
]  # fmt: skip
CLASSES = """
gold: {slo: "ttft_p99.9=250ms,tpot_avg=100ms", adapters: ["adapter-2[0-9][0-9]"]}
fast: {slo: "ttft_p90=250ms,tpot_avg=5ms", adapters: ["adapter-1", adapter-2]}
hasty: {slo: "ttft_p90=2ms,tpot_avg=100ms", adapters: [adapter-3]}
"""


def provision(*arguments):
    return CliRunner().invoke(app, [str(one) for one in arguments])


def test_each_class_is_held_to_its_own(tmp_path):
    """Of the tail nearly all are asked to be in time, of two hot ones a step, of one a TTFT; all others have --slo."""
    file = tmp_path / "classes.yaml"
    file.write_text(CLASSES)
    done = provision(*ASKED, "--classes", file, "--json")
    assert done.exit_code == 0, done.output
    found = {one["name"]: one for one in json.loads(done.stdout)["classes"]}
    assert {name: one["adapters"] for name, one in found.items()} == {"gold": 100, "fast": 2, "hasty": 1, "others": 197}
    assert {name: one["fails"] for name, one in found.items()} == {
        "gold": ["admission"], "fast": ["tpot"], "hasty": ["ttft"], "others": [],
    }  # fmt: skip
    assert found["hasty"]["share_within_ttft"] == 0 and found["others"]["share_within_ttft"] > 0.95
    assert 0.5 < found["gold"]["share_within_ttft"] < 0.999 and found["gold"]["worst"][0][0].startswith("adapter-2")
    text = " ".join(provision(*ASKED, "--classes", file, "--no-simulate").output.split())
    assert "Class gold, 100 adapters: met." in text and "Class fast, 2 adapters: FAILS tpot (a step takes" in text


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
def test_classes_that_cannot_be_are_refused_in_one_line(tmp_path, text, says):
    (tmp_path / "classes.yaml").write_text(text)
    done = provision(*ASKED, "--classes", tmp_path / "classes.yaml", "--no-simulate")
    assert done.exit_code == 2 and says in done.output and done.output.count("\n") == 1, done.output
