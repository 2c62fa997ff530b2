"""bench.gpu_run without a GPU: what protects the little time that a GPU is lent for, over real processes."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile

import psutil
import pytest

from bench import fetch_gpu
from bench.gpu_run import __main__ as command
from bench.gpu_run import archive, carried, cuda_tests, lab, probe, record, report, runner, stage
from bench.gpu_run.stages import LENT_SECONDS, STAGES, Stage, chosen
from bench.gpu_run.state import ROOT, Outcome, Results
from lora_server.demo import children
from provisioning.model import profile
from tests.support.serving import HANG_SECONDS, all_gone, until

SECONDS = 60.0
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


def fake(name, deed, seconds=SECONDS, resumes=False):
    module = "bench.gpu_run.none" if deed == "absent" else "tests.support.gpu.gpu_stage"
    return Stage(name, seconds, f"does {deed}", module, (deed,), resumes)


def run(results, deed, **options):
    return runner.run(fake(deed, deed, **options), results, ENVIRONMENT, "code")


# -- the runner


@pytest.mark.parametrize(
    ("deed", "ending", "reason"),
    [
        ("pass", "passed", ""),
        ("fail", "failed", "1 of 2 not as expected: two (it is wrong)"),
        ("unable", "unable", "no such thing here"),
        ("raise", "failed", "ValueError: got 1, expected 2"),
        ("crash", "failed", "ended by SIGSEGV"),
        ("exit", "failed", "ended with 1: a wrong flag, say"),
        ("absent", "failed", "ended with 1: "),
    ],
)
def test_a_stage_that_ends_says_how(tmp_path, deed, ending, reason):
    results = Results(tmp_path)
    outcome = run(results, deed)
    assert outcome.ending == ending and outcome.reason.startswith(reason) and bool(outcome.reason) == bool(reason)
    assert results.load(deed) == outcome and results.ended(deed) == (ending != "unable")
    if deed == "absent":
        assert "No module named bench.gpu_run.none" in outcome.reason
    else:
        assert outcome.lines[0] == {"kind": "did", "deed": deed, "earlier": 0}


@pytest.mark.long
def test_a_deadline_ends_the_whole_family_and_keeps_what_was_found(tmp_path):
    results = Results(tmp_path)
    outcome = run(results, "hang", seconds=8.0)
    assert (outcome.ending, outcome.reason) == ("cut", "not done within 8 s")
    assert not results.ended("hang"), "it is to run again"
    (line,) = record.picked(outcome.lines, "family")
    assert not any(psutil.pid_exists(pid) for pid in line["pids"])


@pytest.mark.long
def test_a_killed_run_leaves_no_process_and_its_stage_begins_again(tmp_path):
    results = Results(tmp_path)
    lines = ("from pathlib import Path", "from tests.device.test_gpu_run import Results, run")
    code = "\n".join((*lines, f"run(Results(Path({str(tmp_path)!r})), 'sleep')"))
    parent = subprocess.Popen(children.own([sys.executable, "-c", code]), cwd=ROOT, env=ENVIRONMENT)
    found = lambda: record.picked(record.read(results.record("sleep")), "family")  # noqa: E731
    until(found, "the stage is at it", HANG_SECONDS)
    (line,) = found()
    family = [psutil.Process(pid) for pid in line["pids"]]
    parent.kill()
    parent.wait()
    all_gone(family)
    assert results.load("sleep") is None and not results.ended("sleep")


def test_only_a_stage_that_resumes_reads_its_earlier_record(tmp_path):
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
    deeds = {"first": "pass", "second": f"needs:{first}", "third": "fail", "fourth": "pass"}
    made = tuple(fake(name, deed, 90.0 if name == "fourth" else SECONDS) for name, deed in deeds.items())
    monkeypatch.setattr("bench.gpu_run.stages.STAGES", made)
    monkeypatch.setattr(command, "STAGES", made)
    monkeypatch.setattr(command, "gpu_name", lambda: "no-gpu")

    def call(*arguments):
        names = {"--raw": "raw", "--out": "out", "--carried": "none", "--back": "back"}
        folders = [part for flag, name in names.items() for part in (flag, str(tmp_path / name))]
        monkeypatch.setattr(sys, "argv", ["bench.gpu_run", *folders, *arguments])
        with pytest.raises(SystemExit) as ended:
            command.main()
        return ended.value.code

    return call


def began(tmp_path):
    return {path.stem: json.loads(path.read_text())["began"] for path in (tmp_path / "raw/no-gpu").glob("*.json")}


def test_a_run_continues_where_the_last_one_stopped_and_reports_after_each_stage(table, tmp_path, capsys, monkeypatch):
    assert table("--only", "first,second") == 0, "and the second found the first one's JSON on disk"
    (path,) = (tmp_path / "out").glob("gpu_no-gpu_*.md")
    assert "| first  | passed  |" in path.read_text() and "| third  | not run |" in path.read_text()
    before = began(tmp_path)
    assert table("--budget", "110") == 1, "the third fails"
    after = began(tmp_path)
    assert set(after) == {"first", "second", "third", "fourth"} and before.items() <= after.items()
    assert "1 of 2 not as expected: two (it is wrong)" in path.read_text()
    assert table("--only", "first") == 0, "it has passed"
    assert began(tmp_path) == after, "nothing ran again"
    monkeypatch.setattr(command.time, "monotonic", iter(range(0, 10**6, 40)).__next__)
    assert table("--again", "--budget", "115") == 1
    said = "left for the next call: second, third, fourth"
    assert said in capsys.readouterr().out, "each call takes 40 s of 115, of which 15 are for packing"
    assert set(began(tmp_path)) == {"first"}


MPS = """#!/bin/sh
echo "$1 $(basename "$CUDA_MPS_PIPE_DIRECTORY") $$" >> %s
case "$1" in -f) exec sleep 600;; esac
read -r command
"""


def test_stages_under_mps_have_a_service_of_their_own_that_ends_with_them(table, tmp_path, monkeypatch):
    """The service is a stand-in that writes down how it was called; the real one is NVIDIA's."""
    control, said = tmp_path / "nvidia-cuda-mps-control", tmp_path / "said"
    control.write_text(MPS % said), control.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert table("--mps", "--only", "first") == 0
    calls = [line.rsplit(" ", 1) for line in said.read_text().splitlines()]
    assert [how for how, _ in calls if how.startswith("-f")] == ["-f pipe"], "one service"
    assert len(calls) >= 3, "it was asked whether it is there, and told to quit"
    assert not any(psutil.pid_exists(int(pid)) for _, pid in calls) and not (tmp_path / "raw/no-gpu").exists()
    assert "| first  | passed  |" in next((tmp_path / "out").glob("gpu_no-gpu-mps_*.md")).read_text()
    assert command.gpu_name() == "no-gpu" and (tmp_path / "raw/no-gpu-mps/first.json").exists()


def test_wrong_flags_are_named(capsys):
    least = "got 100 s, expected at least 375: peers may take 360 s"
    for flag, value, reason in (("--only", "probe,none", "got none, expected some of probe, "),
                                ("--budget", "100", least)):  # fmt: skip
        with pytest.raises(SystemExit, match="2"):
            command.parse([flag, value])
        assert f"{flag}: {reason}" in capsys.readouterr().err


def test_the_most_valuable_stages_fit_a_lent_gpu_and_each_stage_one_call():
    spent = command.BUDGET_SECONDS - command.PACK_SECONDS
    assert max(one.seconds for one in STAGES) <= spent
    assert [one.name for one in chosen("put,probe")] == ["probe", "put"], "in the table's order"
    names = [one.name for one in STAGES]
    call, lent = ([*STAGES[: names.index(last) + 1]] for last in ("engine-gpu", "ours"))
    assert sum(one.seconds for one in call) <= spent, "one call has them all"
    assert {"probe", "headline", "live", "inproc", "correctness"} <= {one.name for one in call}
    assert sum(one.seconds for one in lent) <= LENT_SECONDS == 14 * 60
    assert {"engine-gpu", "ipc-gpu", "ours"} <= {one.name for one in lent}


def test_a_call_on_another_host_continues_from_the_archives(table, tmp_path, capsys):
    assert table("--only", "first") == 0
    cubin = tmp_path / "raw/no-gpu/cupy/a/b.cubin"
    cubin.parent.mkdir(parents=True)
    cubin.write_bytes(b"compiled")
    assert table("--only", "first,second") == 0
    assert {path.name for path in (tmp_path / "back").iterdir()} == {archive.RESULTS, archive.CACHE}
    before = began(tmp_path)
    shutil.rmtree(tmp_path / "raw")
    shutil.rmtree(tmp_path / "out")
    assert table("--only", "first,second") == 0 and began(tmp_path) == before, "nothing ran again"
    assert cubin.read_bytes() == b"compiled" and "files unpacked" in capsys.readouterr().out
    (tmp_path / "raw/no-gpu/first.log").write_text("newer")
    assert table("--only", "first") == 0
    assert (tmp_path / "raw/no-gpu/first.log").read_text() == "newer", "what is there already stays"
    with pytest.MonkeyPatch.context() as patch:  # a run that is killed just after it forgot
        patch.setattr(command.runner, "run", lambda *_: sys.exit("killed"))
        assert table("--only", "first", "--again") == "killed"
    shutil.rmtree(tmp_path / "raw")
    table("--only", "second")
    assert set(began(tmp_path)) == {"second"}, "the archive has forgotten, too"
    (tmp_path / "back" / archive.RESULTS).write_bytes(b"half of one")
    assert "cannot be unpacked" in table("--only", "first")


def test_archives_stay_below_their_limit_and_take_no_foreign_names(tmp_path, monkeypatch):
    monkeypatch.setattr(archive, "MOST_BYTES", 40_000)
    results = tmp_path / "raw" / "h100"
    (results / "cupy").mkdir(parents=True)
    sizes = {"a.json": 10_000, "b.log": 1_000_000, "c.txt": 10, "cupy/x": 9_000, "cupy/y": 60_000}
    for name, count in sizes.items():
        (results / name).write_bytes(os.urandom(count))
    left = archive.pack(tmp_path / "back", results, [])
    assert left == ["raw/h100/b.log", "raw/h100/cupy/y"]
    assert all(path.stat().st_size <= archive.MOST_BYTES for path in (tmp_path / "back").iterdir())
    assert archive.unpack(tmp_path / "back", tmp_path / "other", tmp_path / "out") == 2
    assert (tmp_path / "other/h100/a.json").read_bytes() == (results / "a.json").read_bytes()
    for name in ("../x", "raw/../../x", "raw//x", "elsewhere/x"):
        with tarfile.open(tmp_path / "back" / archive.RESULTS, "w:gz") as tar:
            archive._add(tar, name, b"x")
        with pytest.raises(ValueError, match="expected files of raw and reports"):
            archive.unpack(tmp_path / "back", tmp_path / "third", tmp_path / "out")
    assert not (tmp_path / "third").exists() and not (tmp_path / "x").exists()


def test_starts_of_shards_are_read_out_of_a_servers_log(tmp_path):
    started = {"event": "shard started", "shard": 1, "seconds": 2.5}
    (tmp_path / "log").write_text(f"a line\n{json.dumps(started)}\n{json.dumps({'event': 'serving'})}\n")
    found = record.Record(tmp_path / "record")
    lab.record_starts(found, tmp_path / "log")
    assert found.find("start") == [{"kind": "start", "shard": 1, "seconds": 2.5}]


def test_the_longest_kernels_are_compiled_first():
    names = list(probe.COMPILED)
    assert names[:3] == ["serve", "serve, rows in 8 bits", "lora_step, bfloat16"]
    assert {*probe.NEEDED, *probe.NEEDED_FIRST} <= set(names)


def test_every_file_with_tests_for_gpus_is_run():
    names = [path.name for path in cuda_tests.files()]
    assert names[0] == "test_kernels_cuda.py"
    assert set(names) >= {"test_device.py", "test_cuda_ipc.py", "test_vllm_plugin.py"}
    for one in STAGES:
        if "--file" in one.arguments:
            assert len(cuda_tests.files(one.arguments[1])) == 1


# -- rehearsals


def test_a_rehearsal_fails_for_whatever_stops_a_stage_before_the_gpu(table, tmp_path, monkeypatch):
    for deed, status in (("raise", 1), ("unable", 1), ("exit", 1), ("pass", 1), ("rehearse", 0)):
        monkeypatch.setattr("bench.gpu_run.stages.STAGES", (fake("only", deed, HANG_SECONDS),))  # one imports torch
        assert table("--rehearse") == status, deed

    def work(its, arguments):
        its.add("check", name=arguments.name, good=arguments.good)
        return arguments.good

    found, given = record.Record(tmp_path / "record"), argparse.Namespace(good=False, name="cuda")
    stage.play(work, found, given, good=True)
    with pytest.raises(RuntimeError, match=r"not as expected: .*'name': 'cpu', 'good': False"):
        stage.play(work, found, given, name="cpu")


def test_a_rehearsal_on_a_busy_cpu_is_not_cut_at_a_limit_that_is_a_gpus(table, monkeypatch):
    monkeypatch.setattr("bench.gpu_run.stages.STAGES", (fake("only", "rehearse", seconds=0.01),))
    assert table("--rehearse") == 0


# -- reports


def outcome_of(name, ending, lines, reason="", code="abc"):
    return Outcome(name, ending, reason, 1.0, "2026-11-22T10:00:00+00:00", f"python -m {name}", code, lines, "a log")


def site(name, us):
    found = {"kind": "site", "model": "dbrx", "tokens": 64, "site": name, "us": us, "with_routing_us": us + 1}
    return {**found, "floor_us": us / 2, "floor_ratio": 0.5, "max_rel_err": 1e-3}


def test_a_report_has_what_was_measured_and_what_failed_and_does_not_name_the_machine(tmp_path):
    results = Results(tmp_path / "raw")
    report.write(STAGES, results, tmp_path, "h100")
    assert not [*tmp_path.glob("kernels_*"), *tmp_path.glob("profile_*")], "nothing was measured"
    peer = {"kind": "peer", "model": "dbrx", "tokens": 64, "peer": "vllm"}
    where = f"{ROOT}/tests/x.py {sys.prefix}/lib {tempfile.gettempdir()}/y"
    results.save(outcome_of("ours", "cut", [
        {"kind": "hardware", "gpu": "some GPU", "read_gbps": 4000.0}, {"kind": "overhead", "overhead_us": 7.5},
        site("gate_up", 200.0), site("down", 100.0), {**site("gate_up", 400.0), "tokens": 256}]))  # fmt: skip
    results.save(outcome_of("peers", "failed", [
        {**peer, "site": "gate_up", "us": 500.0}, {**peer, "site": "down", "us": 400.0}], "no option ran"))  # fmt: skip
    results.save(outcome_of("ipc", "failed", [
        {"kind": "scenario", "name": "killed", "good": False, "reason": "the context is dead"}], where))  # fmt: skip
    results.save(outcome_of("put", "passed", [], code="other"))
    results.save(outcome_of("inproc", "passed", [{"kind": "inproc", "cell": "EP4, 128 tokens", "us": 126.0}]))
    results.save(outcome_of("headline", "passed", [
        {"kind": "hardware", "gpu": "NVIDIA H100"}, {"kind": "headline", "tokens": 128, "us": 90.5}]))  # fmt: skip
    latency = {"kind": "latency", "what": "put, wait, add in a graph", "median_us": 4000.0, "p95_us": 5000.0}
    results.save(outcome_of("served", "passed", [latency, {"kind": "start", "shard": 0, "seconds": 12.5}]))
    text = report.write(STAGES, results, tmp_path, "h100").read_text()
    measured = profile.load(tmp_path / "profile_h100_2026-11-22.json")
    known = measured.lookup("compute", batch=128, ep=4)
    assert known is not None and (known.value, known.kind) == (90.5, "measured"), "what the planner reads"
    document = json.loads((tmp_path / "kernels_h100_2026-11-22.json").read_text())
    assert list(document) == ["cells", "overhead_us", "command", "hardware"]
    keys = ["model", "tokens", "floor_ratio", "peer_ratio", "fastest_peer", "max_rel_err"]
    assert [list(cell) for cell in document["cells"]] == [keys, keys]
    assert document["cells"][0] == dict(zip(keys, ["dbrx", 64, 0.5, 3.0, "vllm", 1e-3], strict=True))
    assert document["cells"][1]["fastest_peer"] is None, "peers were not measured there"
    assert document["overhead_us"] == 7.5 and document["hardware"] == {"gpu": "some GPU", "read_gbps": 4000.0}
    assert text.count(report.SLICED_NOTE) == 2, "beside the figures of served, and of ipc"
    assert text.index("| EP4, 128 tokens") < text.index("| first "), "what is looked for at once comes first"
    for said in (
        "the context is dead",
        "no option ran",
        "| engine      | not run |",
        "different sources",
        "| served | 0     | 12.5 |",
    ):
        assert said in text, said
    assert "./tests/x.py PYTHON/lib TMP/y" in text and str(ROOT) not in text and sys.prefix not in text


# -- what is carried


def wheel(path, files):
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return path


def test_wheels_are_unpacked_once_and_again_when_they_change(tmp_path, monkeypatch):
    monkeypatch.setattr(carried, "PYTHON", ".".join(platform.python_version_tuple()[:2]))
    folder, site = tmp_path / "gpu", tmp_path / "site"
    (folder / "wheels").mkdir(parents=True)
    assert carried.unpack(folder, site) is None and "no wheels in" in carried.unused(folder)
    files = {"one/a.py": "x = 1", "one-1.data/purelib/b.py": "", "one-1.data/scripts/c": "", "../d.py": ""}
    wheel(folder / "wheels" / "one-1-py3-none-any.whl", files)
    assert carried.unpack(folder, site) == site
    assert {path.name for path in site.rglob("*") if path.is_file()} == {"a.py", "b.py", carried.STAMP}
    assert not (tmp_path / "d.py").exists()
    (site / "one" / "a.py").write_text("kept")
    carried.unpack(folder, site)
    assert (site / "one" / "a.py").read_text() == "kept", "the same wheels"
    wheel(folder / "wheels" / "two-1-py3-none-any.whl", {"two/e": ""})
    carried.unpack(folder, site)
    assert (site / "one" / "a.py").read_text() == "x = 1" and (site / "two" / "e").exists()
    monkeypatch.setattr(carried, "PYTHON", "2.7")
    assert carried.unpack(folder, site) is None, "they are for another Python"
    assert "are for Python 2.7, and this is" in carried.unused(folder)
    (folder / "wheels" / "three-1-py3-none-any.whl").write_text("half of one")
    with pytest.raises(ValueError, match=r"three-1-py3-none-any.whl is no wheel; .* python -m bench.fetch_gpu"):
        carried.check(folder)


def test_wheels_that_the_image_lacks_are_collected(tmp_path, monkeypatch):
    known = {*fetch_gpu.image(), *fetch_gpu.pins()}
    assert {fetch_gpu.canonicalize_name(one.name) for one in fetch_gpu.roots()} <= known
    windows = "d; sys_platform == 'win32'"
    asks = {"a": f"b>=1; python_version >= '3.12'\nc; extra == 'x'\n{windows}", "b": "numpy>=2", "e": ""}

    def download(name, folder):
        metadata = "".join(f"Requires-Dist: {line}\n" for line in asks[name].splitlines())
        return wheel(folder / f"{name}-1-py3-none-any.whl", {f"{name}-1.dist-info/METADATA": metadata})

    monkeypatch.setattr(fetch_gpu, "download", download)
    monkeypatch.setattr(fetch_gpu, "roots", lambda: [fetch_gpu.Requirement(name) for name in ("a", "e", "torch")])
    found = fetch_gpu.collect(tmp_path / "wheels")
    assert [path.name[0] for path in found] == ["a", "b", "e"]
    asks["b"] = "numpy>=99"
    reason = r"b-1-py3-none-any.whl needs numpy>=99, and the image has 2\.\S+: pin"
    with pytest.raises(fetch_gpu.CarryError, match=reason):
        fetch_gpu.collect(tmp_path / "wheels")
