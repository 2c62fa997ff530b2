"""`provision watch`: a live server under load, saved scrapes, good and bad; and the server's rule beside the plan's."""

import json
import re
import signal
import subprocess
import sys
import urllib.request

import numpy as np
import pytest

from bench import admission, admission_cells, harness
from lora_server.demo import children
from lora_server.demo.launch import free_ports
from lora_server.spec import PRESETS
from provisioning.inputs import InputError
from provisioning.watch import measured, scrape
from provisioning.workload.requests import Lengths
from provisioning.workload.workload import Workload, zipf
from tests.support.far import far_server
from tests.support.provision import as_json, check_refused, provision, typed
from tests.support.serving import HANG_SECONDS, until

ASKED = typed(slo="ttft_p95=250ms,tpot_avg=100ms", model="mixtral-8x7b", adapters=256, gpu="hopper-96", instances=2)
ASKED += typed(batch_size=64)
SCALE = admission_cells.Scale(load=10.0, hold_seconds=0.6, seconds=6.0)


def planned(file, *more):
    """Write a plan as the console script does, whose command is that of sys.argv."""
    asked = [*ASKED, *map(str, more), "--no-simulate", "--out", str(file)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["provision", *asked])
        assert provision(*asked).exit_code == 0
    return file


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    return planned(tmp_path_factory.mktemp("plan") / "plan.yaml")


def page(at, calls, *, seconds=2.0, immediate=None, steps=1000, compute=0.3, adapters=256):
    """A scrape of a server whose adapters ended so many holds, each of so many seconds."""
    total = sum(calls.values())
    held = "".join(
        f'lora_server_adapter_hold_seconds_count{{adapter="{name}"}} {num}\n'
        f'lora_server_adapter_hold_seconds_sum{{adapter="{name}"}} {num * seconds}\n'
        for name, num in calls.items()
    )
    now = total if immediate is None else immediate
    return (
        f"# scrape {at}\n# TYPE lora_server_adapter_hold_seconds summary\n{held}"
        f'lora_server_admissions_total{{kind="immediate"}} {now}\n'
        f'lora_server_admissions_total{{kind="queued"}} {total - now}\n'
        f"lora_server_admission_queue 0\nlora_server_adapters {adapters}\n"
        f'lora_server_steps_total{{shard="0"}} {steps}\nlora_server_compute_seconds_total{{shard="0"}} {compute}\n'
        f'lora_server_wait_seconds_total{{shard="0"}} 0.1\nlora_server_entries_total{{shard="0"}} {steps * 10}\n'
        "python_info 1\n"
    )


def hours(loads, calls=None):
    """A day of looks, an hour apart: so many requests in flight in every hour."""
    shares = calls or dict(zip((f"t{i}" for i in range(256)), zipf(1.2, 256), strict=True))
    pages, so_far = [], 0.0
    for hour in range(len(loads) + 1):
        pages.append(page(hour * 3600, {name: round(so_far * share) for name, share in shares.items()}, steps=hour))
        so_far += (loads[hour] if hour < len(loads) else 0) * 3600 / 2.0
    return "".join(pages)


# -- a live server


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_live_server_admits_as_simulated_and_is_measured(tmp_path, plan):
    admission.make(tmp_path, 16)
    other, plan = plan, planned(tmp_path / "plan.yaml", "--model", tmp_path / "base")
    workload, record = Workload(popularity=zipf(1.2, 16)), tmp_path / "record"
    with admission.serving(tmp_path, "--max-active-adapters", "5") as server:
        first = as_json("watch", "--server", server.http, "--record", record, "--plan", plan)
        assert first["scrapes"] == 1 and first["now"] is None and "A rate needs two scrapes" in first["advice"]
        check_refused(provision("watch", "--server", server.http, "--seconds", "1", "--plan", other), "is of mixtral")
        row = admission.measure(server, workload, 5, SCALE, tmp_path, clients=2)
        harness.until(lambda: not harness.status(server.address).active, "all are released")
        found = as_json("watch", "--server", server.http, "--record", record, "--plan", plan)
    assert row["calls"] == 100 and row["client_count"] == row["server_count"]
    assert 0.3 < row["as_asked"] < 0.9, "simulated: each call when it came, for as long as it held"
    assert abs(row["measured"]["mean"] - row["as_asked"]) < 0.15, row
    rows = {one["what"]: one for one in found["measured"]}
    assert row["admitted"] <= found["requests"] <= row["calls"] and found["restarts"] == 0
    at_once = row["server_count"][0]  # of all that asked, or of those that had their turn before the clients ended
    assert at_once / row["calls"] - 0.02 <= rows["admitted at once"]["measured"] <= at_once / row["admitted"] + 0.02
    late = row["late_p95_ms"] / 1e3  # a client on a busy machine asks late, and lets go as late
    assert 0.5 < rows["an adapter is held"]["measured"] < 1.2 + late
    by_rate = rows["requests/s"]["measured"] * rows["an adapter is held"]["measured"]
    assert rows["requests in flight"]["measured"] == pytest.approx(by_rate)
    assert found["most_called"][0]["adapter"] == "tenant-0"
    assert rows["share of the hottest"]["measured"] == pytest.approx(float(workload.popularity[0]), abs=0.12)
    assert found["now"]["gpus"] >= 1 and "LoRA Server GPU" in found["advice"]


# -- saved scrapes


@pytest.mark.long
def test_a_recorded_day_says_when_how_many(tmp_path, plan):
    """A load 30 times as large in one hour asks for more GPUs there; and the table is said in words."""
    file = tmp_path / "day"
    file.write_text(hours([8, 240]))
    found = as_json("watch", file, "--plan", plan)
    gpus = {one["hour"]: one["gpus"] for one in found["by_hour"]}
    assert list(gpus) == [0, 1] and gpus[0] < gpus[1], gpus
    assert found["by_hour"][1]["in_flight"] == pytest.approx(240, rel=0.01)
    said = provision("watch", file, "--plan", plan).output
    assert "01:00 UTC, model" in said and "at the fullest hour" in said and said.isascii()


def test_the_next_hour_is_what_it_was_on_other_days():
    """Two days of two hours each: what was called at one o'clock is loaded before one o'clock."""
    pages, calls, at = [], {"night": 0, "day": 0}, 0.0
    for day in range(2):
        for hour, name in enumerate(("night", "day")):
            at = 86_400.0 * day + 3600 * hour
            pages.append(page(at, dict(calls)))
            calls[name] += 600 * (1 + day)
            pages.append(page(at + 3000, dict(calls)))
    pages.append(page(at + 86_400 - 3600, calls))
    scrapes = scrape.parsed("".join(pages), "here")
    usual, hour = measured.usual(scrapes), measured.next_hour(scrapes)
    assert hour == 1 and list(usual) == [0, 1] and usual[1].named == ["day"]
    assert usual[1].rate == pytest.approx(1800 / 6000) and usual[0].requests == 1800


@pytest.mark.long
def test_measured_popularity_is_what_is_planned_for(tmp_path, plan):
    """The same load, flat instead of skewed, needs more slots."""
    flat = {f"t{index}": 1 / 256 for index in range(256)}
    slots = {}
    for name, shares in (("zipf", None), ("flat", flat)):
        (tmp_path / name).write_text(hours([24], shares))
        slots[name] = as_json("watch", tmp_path / name, "--plan", plan)["now"]["min_cache_slots"]
    assert slots["zipf"] < slots["flat"]


def between(pages):
    return measured.between(scrape.parsed(pages, "here"))


def test_two_scrapes_say_the_load_between_them():
    seen = between(page(0, {"a": 0, "b": 0}) + page(60, {"a": 30, "b": 10}, adapters=2))
    assert (seen.rate, seen.held_s, seen.in_flight) == pytest.approx((40 / 60, 2.0, 80 / 60))
    # others are even over adapters without a line
    others = between(page(0, {"a": 0, "(other)": 0}) + page(10, {"a": 60, "(other)": 40}, adapters=5))
    found = others.workload(Lengths())
    assert found.popularity.tolist() == pytest.approx([0.6, 0.1, 0.1, 0.1, 0.1]) and found.names[0] == "a"
    # a restart is said, and what came since it counts
    seen = between(page(0, {"a": 100}) + page(10, {"a": 150}) + page(20, {"a": 20}, steps=5, compute=0.1))
    assert (seen.requests, seen.resets) == (70, 1) and seen.admitted == 70


def test_a_server_that_no_request_has_reached_yet(tmp_path, plan):
    (tmp_path / "fresh").write_text(page(0, {"(other)": 0}) + page(60, {"(other)": 0}))
    found = as_json("watch", tmp_path / "fresh", "--plan", plan)
    rows = {one["what"]: one["measured"] for one in found["measured"]}
    assert (rows["requests/s"], rows["requests in flight"]) == (0, 0) and rows["share of the hottest"] is None
    assert found["now"] is None and found["advice"].startswith("No request ended")


def test_a_plan_of_another_model_is_refused(tmp_path, plan):
    for name in ("mixtral-8x7b", "gpt-oss-20b"):
        labels = f'model="a copy of it",geometry="{PRESETS[name].geometry}"'
        build = f"lora_server_build_info{{{labels}}} 1\n"
        (tmp_path / name).write_text(page(0, {"a": 0}) + build + page(60, {"a": 0}) + build)
    as_json("watch", tmp_path / "mixtral-8x7b", "--plan", plan)
    refused = provision("watch", tmp_path / "gpt-oss-20b", "--plan", plan)
    check_refused(refused, "is of mixtral-8x7b (32x4096-8x14336-top2-heads32x128-")


def test_looks_go_on_after_one_at_a_server_that_does_not_say_its_layout(tmp_path, plan):
    about, shown, port = f'model="a copy",geometry="{PRESETS["mixtral-8x7b"].geometry}"', tmp_path / "far", free_ports()

    def show(more):
        text = page(0, {"a": 0}).partition("\n")[2] + f"lora_server_build_info{{{about}{more}}} 1\n"
        (shown / "new").write_text(text)
        (shown / "new").rename(shown / "metrics")

    def looks(outcome):
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=HANG_SECONDS) as answer:
            counts = re.findall(rf'provision_looks_total{{outcome="{outcome}"}} (\d+)', answer.read().decode())
        return int(counts[0])

    with far_server(shown) as far:
        show(',layout="ep1-pp1"')
        asked = typed(server=far.url.removeprefix("http://"), plan=plan, serve=port, seconds=0.05)
        command = [sys.executable, "-m", "provisioning", "watch", *asked]
        with children.start(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            try:
                assert json.loads(process.stdout.readline())["serving"] == 1
                show("")
                until(lambda: looks("failed"), "a look fails")
                before = looks("done")
                show(',layout="ep1-pp1"')
                until(lambda: looks("done") > before, "the next one does not")
                process.send_signal(signal.SIGTERM)
                said, errors = process.communicate(timeout=HANG_SECONDS)
            finally:
                process.kill()
    assert process.returncode == 0 and "layout: got ''" in said, errors


@pytest.mark.parametrize("value", ["+Inf", "-Inf", "NaN", "-1"])
def test_only_samples_that_are_read_must_be_finite(value):
    others = f"lora_server_certificate_expiry_seconds {value}\nlora_server_page_seconds {value}\n"
    assert between(page(0, {"a": 0}) + others + page(60, {"a": 30}) + others).requests == 30
    with pytest.raises(InputError, match=r"lora_server_loads_total is .*, expected a finite number"):
        between(page(0, {"a": 0}) + f"lora_server_loads_total {value}\n")


@pytest.mark.parametrize(("text", "says"), [
    ("", "no scrape of a lora-server"),
    ("node_cpu_seconds_total 3\n", "no scrape of a lora-server"),
    ("<html>\n<body>", "Prometheus' text format"),
    ('lora_server_admissions_total{kind="immediate"} 3\n', "too old: upgrade it"),
    (page(0, {"a": 1}).replace("} 1\n", "} NaN\n"), "expected a finite number"),
    (page(9, {"a": 1}) + page(3, {"a": 2}), "not in the order of time"),
    (page(3, {"a": 1}) + page(3, {"a": 2}), "the same time"),
    ("lora_server_steps_total 1\n" + page(3, {"a": 2}), "lacks its heading"),
])  # fmt: skip
def test_a_file_that_is_no_scrape_is_one_line(tmp_path, text, says):
    (tmp_path / "bad").write_text(text)
    check_refused(provision("watch", tmp_path / "bad"), says)


def test_a_server_or_plan_that_cannot_be_used_is_one_line(tmp_path):
    (tmp_path / "day").write_text(hours([8]))
    (tmp_path / "plain.yaml").write_text("layout: ep1-pp1\n")
    (tmp_path / "odd.yaml").write_text("# command: provision --slo x --nonsense\nlayout: ep1-pp1\n")
    for arguments, says in (
        (["--server", "127.0.0.1:1"], "cannot be read"),
        (["--server", "localhost"], "expected HOST:PORT"),
        ([tmp_path / "day", "--plan", tmp_path / "plain.yaml"], "write it again with"),
        ([tmp_path / "day", "--plan", tmp_path / "odd.yaml"], "cannot be used here"),
        ([tmp_path / "day", "--record", tmp_path / "x"], "leave one of the two out"),
    ):
        check_refused(provision("watch", *arguments), says)


@pytest.mark.parametrize(("adapters", "skew", "load", "slots"), [
    (512, 1.2, 256, 90), (128, 1.2, 64, 20), (128, 1.2, 64, 32), (64, 0.8, 40, 24), (64, 1.0, 20, 12),
])  # fmt: skip
def test_the_rule_admits_what_the_simulation_admits(adapters, skew, load, slots):
    """In virtual time, at 30 ms per token; from where hardly any call waits to where four in ten do."""
    workload = Workload(popularity=zipf(skew, adapters))
    scale = admission_cells.Scale(load=load, hold_seconds=256 * admission_cells.TOKEN_SECONDS)
    requests = admission_cells.calls(workload, scale, 3000, seed=1)
    plays = admission_cells.simulated, admission_cells.by_rule
    simulated, by_rule = (play(requests, slots)[1000:].mean() for play in plays)
    assert 0.5 < simulated < 0.99
    assert abs(by_rule - simulated) < 0.02


def test_intervals_are_of_batches_of_what_comes_in_time():
    found = admission_cells.in_batches(np.repeat([-1.0, 1.0], 500), lowest=-1.0)
    assert found.mean == pytest.approx(0.0) and found.low < -0.6 and found.high > 0.6
    assert admission_cells.in_batches(np.ones(100)).low == 1.0
