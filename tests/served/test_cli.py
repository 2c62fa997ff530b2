"""Errors of the command that name the flag, a quick --help, and the demo as JSON."""

import json
import resource
import socket
import subprocess
import sys

import pytest

from lora_server.demo import tiny
from lora_server.demo.launch import running_server
from tests.support.serving import HANG_SECONDS, cli
from tests.support.workload import workload

pytestmark = pytest.mark.usefixtures("forked")
DEMO_SECONDS = 900.0  # two minutes of one CPU; what it starts has limits of its own


def test_errors_are_one_line_and_exit_code_two(tmp_path):
    done = cli("serve", "--base-model", str(tmp_path))
    assert done.returncode == 2
    assert done.stderr.startswith("error: base model: no config.json")
    assert done.stderr.count("\n") == 1
    done = cli("serve", "--base-model", "mixtral-8x7b", "--adapters", str(tmp_path / "nowhere"))
    assert (done.returncode, "nowhere" in done.stderr) == (2, True)


def test_doctor_says_what_fails_of_a_configuration(tmp_path):
    """On whatever machine this is: JSON, its exit code, and what a configuration names."""
    config = tmp_path / "node.yaml"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config.write_text(f"base-model: none\nlisten: 127.0.0.1:{taken.getsockname()[1]}\nhttp: 127.0.0.1:0\n")
        done, told = cli("doctor", "--config", str(config), "--json"), cli("doctor", "--config", str(config))
    states = {one["check"]: one["state"] for one in json.loads(done.stdout)}
    assert done.returncode == told.returncode == 1 and states["port"] in ("failed", "ok")
    assert "failed: port: end it, or give another --listen" in told.stdout
    config.write_text("listens: 1\n")
    done = cli("doctor", "--config", str(config))
    assert done.returncode == 2 and "no such setting" in done.stderr


BAD_STARTS = {
    "a name that is none": (("--listen", "nohost.invalid:7400"), "--listen nohost.invalid:7400: cannot listen there"),
    "another host": (("--listen", "192.0.2.1:7400"), "--listen 192.0.2.1:7400: cannot listen there"),
    "more stages than layers": (("--layout", "ep1-pp9"), "--layout: got ep1-pp9, in which 5 of 9 shards would own"),
    "more shards than sites": (("--layout", "ep99-pp1"), "--layout: got ep99-pp1, in which 83 of 99 shards"),
    "no place for data": (("--data-dir", "/proc/no/where"), "--data-dir /proc/no/where: cannot be made"),
}


@pytest.mark.parametrize("case", BAD_STARTS)
def test_what_cannot_be_had_is_one_line_and_no_traceback(case):
    flags, words = BAD_STARTS[case]
    done = cli("serve", "--base-model", str(workload("llama").base), "--http", "127.0.0.1:0", *flags)
    assert (done.returncode, done.stderr.startswith(f"error: {words}")) == (2, True), done.stderr
    assert (done.stderr.count("\n"), "expected" in done.stderr) == (1, True)


def test_a_controller_that_is_not_there_is_said_at_once_and_ends_the_node():
    flags = ("--layout", "ep2-pp1", "--nodes", "2", "--node-rank", "1", "--controller", "127.0.0.1:1")
    more = ("--controller-seconds", "1", "--http", "127.0.0.1:0")
    done = cli("serve", "--base-model", str(workload("llama").base), *flags, *more)
    *lines, last = done.stderr.splitlines()
    events = [json.loads(line)["event"] for line in lines]
    assert events[:2] == ["starting", "--controller cannot be reached; trying again"]
    assert (done.returncode, "serving" in events) == (1, False)
    assert last.startswith("error: --controller 127.0.0.1:1: not reached within 1 s") and "expected" in last


def test_a_demo_without_transformers_says_what_to_install():
    code = """
import sys
sys.modules["transformers"] = sys.modules["peft"] = None  # as if they were not installed
from lora_server.cli import main
main()
"""
    done = subprocess.run([sys.executable, "-c", code, "demo"], capture_output=True, text=True, timeout=HANG_SECONDS)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert done.stderr == "error: peft, transformers not installed: install lora-server[demo]\n"


def test_an_address_in_use_is_named(tmp_path):
    base = str(workload("llama").base)
    with running_server(tmp_path / "log", ["--base-model", base]) as server:
        taken = {"--http": (server.http, " (Address already in use)"), "--listen": (server.address, "")}
        for flag, (address, reason) in taken.items():
            (other,) = taken.keys() - {flag}
            done = cli("serve", "--base-model", base, flag, address, other, "127.0.0.1:0")
            words = f"error: {flag} {address}: cannot listen there{reason}; expected a free port"
            assert (done.returncode, words in done.stderr) == (2, True), done.stderr
        document = json.loads(cli("status", "--server", server.address, "--json").stdout)
        assert document["shards"][0]["stats"]["steps"] == 0


def test_a_server_that_is_not_there():
    done = cli("status", "--server", "127.0.0.1:1")
    assert (done.returncode, "is it running?" in done.stderr, done.stdout) == (1, True, "")


def test_help_is_quick_and_without_torch():
    """In time of the CPU, which a busy machine leaves as it is; on an idle one it is what a user waits."""
    command = [sys.executable, "-X", "importtime", "-m", "lora_server", "--help"]
    seconds = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=HANG_SECONDS)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert "serve" in done.stdout
    assert " torch" not in done.stderr
    assert min(seconds) < 1.0  # 0.2 s; the promise is 0.5 s


@pytest.mark.long
@pytest.mark.timeout(DEMO_SECONDS + 60)
def test_demo_as_json(tmp_path):
    """Of a model and adapters of one's own, so small that one layout fits; CI runs the one without."""
    model = tiny.make_model("mixtral", num_hidden_layers=1, num_local_experts=2)
    tiny.save_model(model, tmp_path / "model")
    for seed, name in enumerate(("law", "code")):
        tiny.make_adapter(model, tmp_path / "adapters" / name, lora_rank=4, seed=seed, targets="all")
    own = ["--model", str(tmp_path / "model"), "--adapters", str(tmp_path / "adapters")]
    done = cli("demo", "--json", *own, "--layout", "ep1-pp1", seconds=DEMO_SECONDS)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr, "libraries do not write between the bars"
    document = json.loads(done.stdout)
    assert document["tokens_checked"] == document["tokens_equal"] > 0
    assert document["max_abs_logprob_diff"] <= 1e-4
    assert [row["layout"] for row in document["layouts"]] == ["ep1-pp1"]


def test_demo_needs_both_or_neither(tmp_path):
    done = cli("demo", "--model", str(tmp_path))
    assert (done.returncode, "--adapters" in done.stderr) == (2, True)
