"""`provision compare`: GPUs over the rate, for each way to serve; and the glossary."""

import json

import pytest
from typer.testing import CliRunner

from provisioning.cli import app
from provisioning.plan import fronts
from provisioning.plan.scenario import Flags, scenario

FLAGS = {"slo": "ttft_p95=250ms,tpot_avg=100ms", "model": "gpt-oss-20b", "gpu": "h100", "adapters": 300}
ASKED = [*(piece for name, value in FLAGS.items() for piece in (f"--{name}", str(value))), "--request-rate", "40"]


def provision(*arguments):
    return CliRunner().invoke(app, [str(one) for one in arguments])


def test_every_line_of_a_comparison(tmp_path):
    plot, report = tmp_path / "compare.svg", tmp_path / "compare.html"
    found = provision("compare", *ASKED, "--plot", plot, "--report", report, "--price-per-gpu-hour", "2", "--json")
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


def test_a_budget_is_kept_and_more_buys_more():
    asked = scenario(Flags(**FLAGS, request_rate=40.0))
    for line in ("coupled", "disaggregated"):
        few, many = (fronts.within(line, asked, budget, [1]) for budget in (4, 8))
        assert few.gpus <= 4 and many.gpus <= 8 and many.rate > 1.3 * few.rate
        more = fronts.at_sizes(fronts.LINES[line], asked.scaled(many.rate * 1.05 / 40), [1])
        assert more is None or more.gpus > 8, "it is the most, to 2 %"
    assert fronts.within("disaggregated", asked, 1, [1]) is None


def test_merged_adapters_leave_the_others_their_share_of_the_load():
    asked = scenario(Flags(**FLAGS, zipf=1.6, request_rate=40.0))
    found = fronts.hot_merged(asked)
    assert "merged on" in found.how and found.gpus >= 3 and found.rate == 40.0


@pytest.mark.parametrize(("arguments", "says"), [
    (["--sizes", "1,x"], "--sizes: got '1,x'"),
    (["--budget", "0"], "--budget: got 0"),
    (["--instances", "3"], "no --instances: instances and batches are sought"),
    (["--nonsense", "3"], "No such option"),
    (["--plot", "x.pdf"], "ends in .svg or .png"),
])  # fmt: skip
def test_what_cannot_be_compared_is_refused_in_one_line(arguments, says):
    found = provision("compare", *ASKED, *arguments)
    assert found.exit_code == 2 and says in found.output and found.output.count("\n") == 1, found.output


def test_every_output_names_the_glossary():
    assert "visible load" in provision("glossary").output
    assert "Eq. 5" in json.loads(provision("glossary", "--json").output)
    assert "`provision glossary`" in provision("compare", *ASKED, "--zipf", "1").output
    plan = provision(*ASKED, "--no-simulate").output
    assert "`provision glossary`" in plan and "Prefill, estimated" in plan
