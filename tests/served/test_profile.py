"""`lora-server profile`, on a real server with real engines, and the planner with what it wrote."""

import json

from typer.testing import CliRunner

from lora_server.cli import app
from provisioning.cli import app as provision


def test_a_profile_of_this_machine_is_what_the_planner_takes(tmp_path, forked):
    sizes = ["--ep", "1", "--batches", "2,4", "--prompts", "8", "--engines", "2"]
    made = CliRunner().invoke(app, ["profile", "--out", str(tmp_path / "cpu.json"), "--lora-rank", "8", *sizes])
    assert made.exit_code == 0, made.output
    found = json.loads((tmp_path / "cpu.json").read_text())
    cells = [(row["batch"], row["engines"]) for row in found["terms"]["compute"]]
    assert cells == [(2, 1), (4, 1), (2, 2), (4, 2)] and all(row["us"] > 0 for row in found["terms"]["base_ffn"])
    asked = ["--model", "small-mixtral", "--gpu", "cpu", "--lora-rank", "8", "--transport", "shm", "--adapters", "20"]
    asked += ["--slo", "ttft_p95=60s,tpot_avg=30s", "--instances", "2", "--batch-size", "4", "--no-simulate", "--json"]
    planned = CliRunner().invoke(provision, [*asked, "--profile", str(tmp_path / "cpu.json")])
    assert planned.exit_code == 0, planned.output
    plan = json.loads(planned.stdout)
    assert plan["provenance"]["latency_us.compute"]["kind"] == "measured"
    refused = CliRunner().invoke(provision, [*asked, "--profile", str(tmp_path / "cpu.json"), "--gpu", "h100"])
    assert refused.exit_code == 2 and "measured with gpu cpu, the question has h100" in refused.stderr
