"""bench.gpu_run without a GPU: its runner over real processes, its reports, and what of its stages runs on a CPU."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import zipfile

import psutil
import pytest
import torch

from bench import fetch_gpu
from bench.gpu_run import __main__ as command
from bench.gpu_run import (
    carried,
    cuda_tests,
    nvshmem,
    ours,
    put_timing,
    record,
    report,
    runner,
    sanitizer,
    stage,
    variants,
    world,
)
from bench.gpu_run.stages import LENT_SECONDS, STAGES, Stage, chosen
from bench.gpu_run.state import ROOT, Outcome, Results
from lora_server.demo import children
from lora_server.transport.gpu import nvshmem_build
from tests.support.serving import HANG_SECONDS, all_gone, until

SECONDS = 60.0


def fake(name, deed, seconds=SECONDS, resumes=False):
    return Stage(name, seconds, f"does {deed}", "tests.support.gpu.gpu_stage", (deed,), resumes)


def environment():
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def run(results, deed, **options):
    return runner.run(fake(deed.partition(":")[0], deed, **options), results, environment(), "code")


@pytest.mark.parametrize(
    ("deed", "ending", "reason"),
    [
        ("pass", "passed", ""),
        ("fail", "failed", "1 of 2 not as expected: two (it is wrong)"),
        ("unable", "unable", "no such thing here"),
        ("raise", "failed", "ValueError: got 1, expected 2"),
        ("crash", "failed", "ended by SIGSEGV"),
        ("exit", "failed", "ended with 1: a wrong flag, say"),
    ],
)
def test_how_a_stage_ended_is_on_disk(tmp_path, deed, ending, reason):
    results = Results(tmp_path)
    outcome = run(results, deed)
    assert outcome.ending == ending and outcome.reason.startswith(reason) and bool(outcome.reason) == bool(reason)
    assert results.load(deed) == outcome and results.ended(deed) == (ending != "unable")
    assert outcome.lines[0] == {"kind": "did", "deed": deed, "earlier": 0}
    assert outcome.command == f"python -m tests.support.gpu.gpu_stage {deed}"


def test_a_stage_that_cannot_be_started_is_failed_and_says_why(tmp_path):
    outcome = runner.run(Stage("none", 30, "", "bench.gpu_run.none"), Results(tmp_path), environment(), "code")
    assert outcome.ending == "failed" and "No module named bench.gpu_run.none" in outcome.reason


def test_a_deadline_ends_the_whole_family_and_keeps_what_was_found(tmp_path):
    results = Results(tmp_path)
    outcome = run(results, "hang", seconds=8.0)
    assert (outcome.ending, outcome.reason) == ("cut", "not done within 8 s")
    assert not results.ended("hang"), "it is to run again"
    (line,) = record.picked(outcome.lines, "family")
    assert not any(psutil.pid_exists(pid) for pid in line["pids"])


def test_nothing_is_left_of_a_killed_run_and_its_stage_begins_again(tmp_path):
    code = f"""
from pathlib import Path
from bench.gpu_run.state import Results
from tests.unit.bench.test_gpu_run import run
run(Results(Path({str(tmp_path)!r})), "sleep")
"""
    parent = subprocess.Popen(children.own([sys.executable, "-c", code]), cwd=ROOT, env=environment())
    results = Results(tmp_path)
    until(lambda: record.picked(record.read(results.record("sleep")), "family"), "the stage is at it", HANG_SECONDS)
    (line,) = record.picked(record.read(results.record("sleep")), "family")
    family = [psutil.Process(pid) for pid in line["pids"]]
    parent.kill()
    parent.wait()
    all_gone(family)
    assert results.load("sleep") is None and not results.ended("sleep")


def test_only_a_stage_that_resumes_finds_what_it_had_found(tmp_path):
    results = Results(tmp_path)
    for resumes, expected in ((False, [0]), (True, [0, 1])):
        results.forget("pass")
        results.record("pass").write_text('{"kind": "did", "deed": "pass", "earlier": 0}\n{"kind": "did", "dee')
        outcome = run(results, "pass", resumes=resumes)
        assert [line["earlier"] for line in outcome.lines] == expected
    assert [line["earlier"] for line in run(results, "pass", resumes=True).lines] == [0], "it had ended: anew"


# -- the command


@pytest.fixture
def table(monkeypatch, tmp_path):
    """Four stages instead of the real ones; `call` runs the command and returns its exit status."""
    first = tmp_path / "raw" / "no-gpu" / "first.json"
    made = (
        fake("first", "pass"),
        fake("second", f"needs:{first}"),
        fake("third", "fail"),
        fake("fourth", "pass", 90.0),
    )
    monkeypatch.setattr("bench.gpu_run.stages.STAGES", made)
    monkeypatch.setattr(command, "STAGES", made)
    monkeypatch.setattr(command, "gpu_name", lambda: "no-gpu")

    def call(*arguments):
        folders = ["--raw", str(tmp_path / "raw"), "--out", str(tmp_path / "out"), "--carried", str(tmp_path / "none")]
        monkeypatch.setattr(sys, "argv", ["bench.gpu_run", *folders, *arguments])
        with pytest.raises(SystemExit) as ended:
            command.main()
        return ended.value.code

    return call


def began(tmp_path):
    return {path.stem: json.loads(path.read_text())["began"] for path in (tmp_path / "raw/no-gpu").glob("*.json")}


def test_a_run_goes_on_where_it_stopped(table, tmp_path, capsys, monkeypatch):
    assert table("--only", "first,second") == 0, "and the second found the first one's JSON on disk"
    before = began(tmp_path)
    assert table("--budget", "95") == 1, "the third fails"
    after = began(tmp_path)
    assert set(after) == {"first", "second", "third", "fourth"} and before.items() <= after.items()
    assert table("--only", "first") == 0, "it has passed"
    assert began(tmp_path) == after, "nothing ran again"
    monkeypatch.setattr(command.time, "monotonic", iter(range(0, 10**6, 40)).__next__)
    assert table("--again", "--budget", "100") == 1
    assert "left for the next call: second, third, fourth" in capsys.readouterr().out, "each call takes 40 s of 100"
    assert set(began(tmp_path)) == {"first"}


def test_the_report_is_written_after_each_stage(table, tmp_path):
    assert table("--only", "first") == 0
    (path,) = (tmp_path / "out").glob("gpu_no-gpu_*.md")
    assert "| first  | passed  |" in path.read_text() and "| second | not run |" in path.read_text()
    assert table("--only", "third") == 1
    assert "1 of 2 not as expected: two (it is wrong)" in path.read_text()
    assert "What third said last" in path.read_text()


def test_the_list_names_stages_limits_and_endings(table, monkeypatch, capsys):
    table("--only", "third")
    monkeypatch.setattr(sys, "argv", [*sys.argv[:7], "--list"])
    command.main()
    said = capsys.readouterr().out
    assert "third" in said and "failed" in said and "90 s" in said


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--only", "probe,none"], "--only: got none, expected some of probe, "),
        (["--budget", "100"], "--budget: got 100 s, but peers may take 360 s"),
    ],
)
def test_wrong_flags_are_named(arguments, reason, capsys):
    with pytest.raises(SystemExit) as ended:
        command.parse(arguments)
    assert ended.value.code == 2 and reason in capsys.readouterr().err


def test_every_stage_fits_the_budget_of_a_call():
    assert max(one.seconds for one in STAGES) < command.BUDGET_SECONDS
    assert [one.name for one in chosen("put,probe")] == ["probe", "put"], "in the table's order"


def test_what_is_worth_most_fits_a_lent_gpu():
    names = [one.name for one in STAGES]
    first = STAGES[: names.index("world") + 1]
    assert sum(one.seconds for one in first) <= LENT_SECONDS == 27 * 60
    assert {"correctness", "served", "engine-gpu", "ipc-gpu", "ours", "nvshmem"} <= {one.name for one in first}


def test_a_rehearsal_is_red_for_whatever_stops_a_stage_before_the_gpu(table, monkeypatch):
    for bad in ("raise", "unable", "exit", "pass"):
        monkeypatch.setattr("bench.gpu_run.stages.STAGES", (fake("bad", bad),))
        assert table("--rehearse") == 1, bad
    monkeypatch.setattr("bench.gpu_run.stages.STAGES", (fake("good", "rehearse"),))
    assert table("--rehearse") == 0


def test_what_plays_in_a_rehearsal_has_to_be_right(tmp_path):
    found = record.Record(tmp_path / "record")

    def work(its, arguments):
        its.add("check", name=arguments.name, good=arguments.good)
        return arguments.good

    given = argparse.Namespace(good=False, name="cuda")
    stage.play(work, found, given, good=True)
    with pytest.raises(RuntimeError, match=r"not as expected: .*'name': 'cpu', 'good': False"):
        stage.play(work, found, given, name="cpu")


def test_the_stages_own_rehearsal(tmp_path):
    """One of the real ones; all of them are `make gpu ARGS=--rehearse`, which CI runs."""
    done = subprocess.run(
        children.own([sys.executable, "-m", "bench.gpu_run", "--rehearse", "--only", "put", "--raw", str(tmp_path)]),
        cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=HANG_SECONDS,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    outcome = Results(tmp_path / "rehearsal").load("put")
    assert outcome.reason.startswith((stage.NO_GPU, stage.REHEARSED))


# -- reports


def outcome_of(name, ending, lines, reason=""):
    return Outcome(name, ending, reason, 1.0, "2026-11-22T10:00:00+00:00", f"python -m {name}", "abc", lines, "a log")


def site(name, us):
    found = {"kind": "site", "model": "dbrx", "tokens": 64, "site": name, "us": us, "with_routing_us": us + 1}
    return {**found, "floor_us": us / 2, "floor_ratio": 0.5, "max_rel_err": 1e-3}


def full(results):
    peer = {"kind": "peer", "model": "dbrx", "tokens": 64, "peer": "vllm", "option": {"mode": "x|y"}}
    results.save(outcome_of("probe", "passed", [{"kind": "hardware", "gpu": "some GPU"}]))
    results.save(outcome_of("ours", "cut", [
        {"kind": "hardware", "gpu": "some GPU", "read_gbps": 4000.0}, {"kind": "overhead", "overhead_us": 7.5},
        site("gate_up", 200.0), site("down", 100.0), {**site("gate_up", 400.0), "tokens": 256},
        {"kind": "ncu", "model": "dbrx", "site": "down", "tokens": 64, "reason": "no metrics"}]))  # fmt: skip
    results.save(outcome_of("peers", "failed", [
        {**peer, "site": "gate_up", "us": 500.0}, {**peer, "site": "down", "us": 400.0},
        {"kind": "peer", "model": "dbrx", "site": "down", "peer": "sglang", "error": "no option ran"}]))  # fmt: skip
    results.save(outcome_of("ipc", "failed", [
        {"kind": "scenario", "name": "end_to_end", "good": True, "found": {"ms": 1}},
        {"kind": "scenario", "name": "shard_killed", "good": False, "reason": "the context is dead"}]))  # fmt: skip
    results.save(outcome_of("sanitizer", "unable", [], "no compute-sanitizer on the PATH"))
    results.save(outcome_of("tests", "failed", [
        {"kind": "test", "name": "a|b", "outcome": "passed", "seconds": 1.5},
        {"kind": "test", "name": "c", "outcome": "failed", "seconds": 2.5, "reason": "assert\n0"}]))  # fmt: skip


def test_the_kernels_json_has_its_keys_and_no_others(tmp_path):
    results = Results(tmp_path / "raw")
    full(results)
    report.write(STAGES, results, tmp_path, "h100")
    document = json.loads((tmp_path / "kernels_h100_2026-11-22.json").read_text())
    assert list(document) == ["cells", "overhead_us", "command", "hardware"]
    keys = ["model", "tokens", "floor_ratio", "peer_ratio", "fastest_peer", "max_rel_err"]
    assert [list(cell) for cell in document["cells"]] == [keys, keys]
    assert document["cells"][0] == dict(zip(keys, ["dbrx", 64, 0.5, 3.0, "vllm", 1e-3], strict=True))
    assert document["cells"][1]["fastest_peer"] is None, "peers were not measured there"
    assert document["overhead_us"] == 7.5 and document["hardware"] == {"gpu": "some GPU", "read_gbps": 4000.0}
    assert document["command"] == "python -m ours; python -m peers"


def test_a_report_of_good_bad_and_missing(tmp_path):
    results = Results(tmp_path / "raw")
    full(results)
    text = report.write(STAGES, results, tmp_path, "h100").read_text()
    for said in ("the context is dead", "no compute-sanitizer on the PATH", "no option ran", "no metrics", "a/b",
                 "assert 0", "1 passed, 1 failed, 0 skipped", "some GPU", "What ours said last", "Sources: abc."
                 ):  # fmt: skip
        assert said in text, said
    assert "| engine      | not run |" in text
    widths = {len(line.split("|")) for line in text.splitlines() if line.startswith("| dbrx")}
    assert len(widths) <= 4, "a bar inside a cell would break its row"


def test_a_report_does_not_name_the_machine(tmp_path):
    results = Results(tmp_path / "raw")
    where = f"{ROOT}/tests/x.py {sys.prefix}/lib {tempfile.gettempdir()}/y"
    results.save(outcome_of("ipc", "failed", [{"kind": "scenario", "name": where, "good": False}], where))
    text = report.write(STAGES, results, tmp_path, "h100").read_text()
    assert text.count("./tests/x.py PYTHON/lib TMP/y") == 2 and str(ROOT) not in text and sys.prefix not in text


def test_nothing_measured_writes_no_kernels(tmp_path):
    report.write(STAGES, Results(tmp_path / "raw"), tmp_path, "h100")
    assert not list(tmp_path.glob("kernels_*"))


def test_stages_of_different_sources_are_named(tmp_path):
    results = Results(tmp_path / "raw")
    results.save(outcome_of("probe", "passed", []))
    results.save(Outcome("put", "passed", "", 1.0, "2026-11-22T10:00:00+00:00", "", "other"))
    text = report.write(STAGES, results, tmp_path, "h100").read_text()
    assert "Stages ran with different sources:** abc (probe); other (put)." in text


# -- what is carried


def wheel(path, **files):
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name.replace("__", "/"), text)
    return path


def test_wheels_are_unpacked_once_and_again_when_they_change(tmp_path, monkeypatch):
    monkeypatch.setattr(carried, "PYTHON", ".".join(platform.python_version_tuple()[:2]))
    folder, site = tmp_path / "gpu", tmp_path / "site"
    (folder / "wheels").mkdir(parents=True)
    assert carried.unpack(folder, site) is None and "no wheels in" in carried.unused(folder)
    names = {"one__a.py": "x = 1", "one-1.data__purelib__b.py": "", "one-1.data__scripts__c": "", "..__d.py": ""}
    wheel(folder / "wheels" / "one-1-py3-none-any.whl", **names)
    assert carried.unpack(folder, site) == site
    assert {path.name for path in site.rglob("*") if path.is_file()} == {"a.py", "b.py", carried.STAMP}
    assert not (tmp_path / "d.py").exists()
    (site / "one" / "a.py").write_text("kept")
    carried.unpack(folder, site)
    assert (site / "one" / "a.py").read_text() == "kept", "the same wheels"
    wheel(folder / "wheels" / "two-1-py3-none-any.whl", two__e="")
    carried.unpack(folder, site)
    assert (site / "one" / "a.py").read_text() == "x = 1" and (site / "two" / "e").exists()
    (folder / "wheels" / "three-1-py3-none-any.whl").write_text("half of one")
    with pytest.raises(ValueError, match=r"three-1-py3-none-any.whl is no wheel; .* python -m bench.fetch_gpu"):
        carried.check(folder)


def test_wheels_of_another_python_stay_where_they_are(tmp_path, monkeypatch):
    monkeypatch.setattr(carried, "PYTHON", "2.7")
    (tmp_path / "wheels").mkdir()
    wheel(tmp_path / "wheels" / "one-1-py3-none-any.whl", one__a="")
    assert carried.unpack(tmp_path, tmp_path / "site") is None
    assert "are for Python 2.7, and this is" in carried.unused(tmp_path)


def test_what_is_needed_and_not_in_the_image_is_collected(tmp_path, monkeypatch):
    asks = {
        "a": "b>=1; python_version >= '3.12'\nc; extra == 'x'\nd; sys_platform == 'win32'",
        "b": "numpy>=2",
        "e": "",
    }

    def download(name, folder):
        metadata = "".join(f"Requires-Dist: {line}\n" for line in asks[name].splitlines())
        return wheel(folder / f"{name}-1-py3-none-any.whl", **{f"{name}-1.dist-info__METADATA": metadata})

    monkeypatch.setattr(fetch_gpu, "download", download)
    monkeypatch.setattr(fetch_gpu, "roots", lambda: [fetch_gpu.Requirement(name) for name in ("a", "e", "torch")])
    found = fetch_gpu.collect(tmp_path / "wheels")
    assert [path.name[0] for path in found] == ["a", "b", "e"]
    asks["b"] = "numpy>=99"
    with pytest.raises(
        fetch_gpu.CarryError, match=r"b-1-py3-none-any.whl needs numpy>=99, and the image has 2\.\S+: pin"
    ):
        fetch_gpu.collect(tmp_path / "wheels")


def test_every_dependency_is_in_the_image_or_has_a_version():
    known = {*fetch_gpu.image(), *fetch_gpu.pins()}
    assert {fetch_gpu.canonicalize_name(one.name) for one in fetch_gpu.roots()} <= known


# -- parts of stages


def test_no_file_with_tests_for_gpus_is_forgotten():
    names = [path.name for path in cuda_tests.files()]
    assert names[0] == "test_kernels_cuda.py"
    assert set(names) >= {"test_device.py", "test_cuda_ipc.py", "test_vllm_plugin.py"}


def test_what_the_sanitizer_says_is_understood():
    clean = "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n"
    assert sanitizer.judged(0, clean) == (True, "ERROR SUMMARY: 0 errors")
    found = "========= Invalid __global__ read of size 4 bytes\n========= ERROR SUMMARY: 1 error\n"
    good, reason = sanitizer.judged(sanitizer.FOUND, found)
    assert not good and "1 error" in reason and "Invalid __global__ read" in reason
    assert sanitizer.judged(1, "its result is wrong") == (False, "ended with 1: its result is wrong")
    assert not sanitizer.judged(0, "no summary: the tool did not run")[0]
    assert sanitizer.REFUSED in sanitizer.judged(255, "========= Error: Device not supported\n")[1]


def test_metrics_are_read_out_of_ncus_csv():
    said = """==PROF== Connected to process 12
"ID","Kernel Name","Section Name","Metric Name","Metric Unit","Metric Value","Rule Name"
"0","lora_step_bfloat16","GPU Speed Of Light Throughput","Duration","us","1,286.1",""
"0","lora_step_bfloat16","SpeedOfLight","","","","SOLBottleneck"
==PROF== Disconnected from process 12
"""
    assert ours.metrics(said) == [{"metric": "Duration", "unit": "us", "value": "1,286.1"}]
    assert ours.metrics("==ERROR== nothing") == []


def test_the_put_that_is_timed_is_the_transports():
    rows, word = torch.zeros(4, 8, dtype=torch.bfloat16), torch.zeros(8, dtype=torch.int64)
    order = torch.tensor([3, 1, 0, 2], dtype=torch.int32)
    one = put_timing.step(rows, order, torch.empty_like(rows), word, 7, order[:1])
    assert one.kernel in ("put_vectors", "put_halves")
    assert {rows.data_ptr(), order.data_ptr(), word.data_ptr(), 7, 4, 16} <= set(one.arguments())


@pytest.mark.parametrize("size", nvshmem.WORLDS)
def test_the_nvshmem_stage_plays_with_pes_that_have_no_gpu(tmp_path, size):
    found = record.Record(tmp_path / "record")
    assert nvshmem.play(found, nvshmem.World(size, tmp_path / "module", "tests.support.gpu.gpu_pe"))
    lines = found.find("check")
    assert [line["name"] for line in lines] == list(nvshmem.STEPS) and all(line["good"] for line in lines)
    assert lines[2]["found"]["contexts"] == ["alive"] * (size - 1)


def test_a_pe_that_gets_nothing_fails_the_stage(tmp_path):
    found = record.Record(tmp_path / "record")
    (tmp_path / "lost").touch()
    assert not nvshmem.play(found, nvshmem.World(2, tmp_path / "module", "tests.support.gpu.gpu_pe"))
    assert [line["good"] for line in found.find("check")] == [True, False], "and nothing after it"
    assert "turn 1: [{'event': 'waited', 'took_ns': -1" in found.find("check")[1]["reason"]


def test_a_world_that_goes_wrong_fails_its_stage_and_plays_no_further(tmp_path, monkeypatch):
    """An engine that says something else than what was asked, and one that says nothing."""
    found, given = record.Record(tmp_path / "record"), argparse.Namespace(**world.EMULATED)
    engine = world.Engine("tests.support.gpu.gpu_pe", ["1", "2", str(tmp_path / "module")])
    monkeypatch.setitem(world.STEPS, "answers", lambda its: engine.answer("generated", SECONDS))
    monkeypatch.setitem(world.STEPS, "timed", lambda its: engine.answer("measured", 0.01))
    engine.tell(uid="ab")
    place = world.World(None, tmp_path, tmp_path, given)
    try:
        assert not world.attempt(found, place, "answers") and not world.attempt(found, place, "timed")
    finally:
        engine.end()
    other, late = found.find("check")
    assert "expected 'generated', got {'event': 'module'" in other["reason"] and late["reason"].startswith(
        "RuntimeError"
    )


def test_variants_fit_a_hopper():
    assert all(variant.shared_bytes <= 232_448 for variant in variants.VARIANTS)


def test_the_cstdint_of_the_nvshmem_build_is_c(tmp_path):
    import shutil

    if shutil.which("g++") is None:
        pytest.skip("no g++ here")
    checks = (
        "static_assert(sizeof(int_fast16_t) == 8 && sizeof(uint_least32_t) == 4 && INT64_MAX > 0 && UINT8_MAX == 255);"
    )
    (tmp_path / "x.cpp").write_text(nvshmem_build.cstdint() + checks)
    subprocess.run(["g++", "-std=c++17", "-w", "-fsyntax-only", str(tmp_path / "x.cpp")], check=True, timeout=60)
