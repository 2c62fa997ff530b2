"""`python -m lora_server.demo.serve_vllm`: what it prints works as printed, and it leaves nothing behind."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from lora_server.demo import children, styles
from lora_server.demo.launch import free_address
from tests.support.serving import HANG_SECONDS, all_gone, command_of, descendants, keepers, name_of, until
from tests.vllm.engines import ENVIRONMENT, START_SECONDS

ENVIRON = os.environ | ENVIRONMENT | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}


def command(port, *flags):
    return children.own([sys.executable, "-m", "lora_server.demo.serve_vllm", "--port", port, *flags])


@pytest.fixture
def running(tmp_path, request):
    """(the process, where its directories are, what it printed) once it says what to do; vLLM and a tiny model, with
    flags of vLLM."""
    port, log = free_address().rpartition(":")[2], tmp_path / "log"
    with tempfile.TemporaryDirectory() as scratch, log.open("wb") as stream:  # pytest's own is too long for a socket
        environment = ENVIRON | {"TMPDIR": scratch}
        process = subprocess.Popen(command(port, *request.param), stdout=stream, stderr=stream, env=environment)
        try:
            said = "Ctrl-C ends"
            until(lambda: process.poll() is not None or said in log.read_text(), "vLLM is ready", START_SECONDS)
            assert process.poll() is None, log.read_text(errors="replace")[-4000:]
            yield process, Path(scratch), log.read_text()
        finally:
            process.kill()
            process.wait(HANG_SECONDS)


def typed(line):
    """As bash does it; the JSON that comes back, or the text."""
    done = subprocess.run(
        children.own(["bash", "-c", line]), capture_output=True, text=True, timeout=HANG_SECONDS, check=False
    )
    assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
    return json.loads(done.stdout) if line.startswith("curl") else done.stdout


def check_commands(printed):
    lines = re.findall(r"^  (?!#)(.+)$", printed, re.MULTILINE)
    base, adapted, add, models = lines
    assert "in float32" in printed and "check is an activated LoRA" in printed and "refused" not in printed
    said = {name: typed(line.replace('"pirate"', f'"{name}"')) for name, line in (("base", base), ("pirate", adapted))}
    assert styles.ADDED_LATER in typed(add)
    names = {"base", "lawyer", "pirate", "check", styles.ADDED_LATER}
    assert {card["id"] for card in typed(models)["data"]} == names
    for name in ("lawyer", styles.ADDED_LATER):
        said[name] = typed(adapted.replace('"pirate"', f'"{name}"'))
    for name, answer in said.items():
        assert answer["model"] == name
        expected = styles.PLAIN[0] if name == "base" else styles.STYLES[name][0]
        assert answer["choices"][0]["text"].strip().startswith(expected), answer


AS_VLLM_WOULD = ("--dtype", "auto")  # as for a model of one's own: bfloat16, though the files are float32
HINT = ", in bfloat16; the model's files are float32: to serve them so, add --dtype float32 to ARGS"


@pytest.mark.parametrize(
    ("running", "number"),
    [((), signal.SIGTERM), pytest.param(AS_VLLM_WOULD, signal.SIGKILL, marks=pytest.mark.long)],
    indirect=["running"],
)
def test_what_it_prints_works_and_nothing_is_left(running, number):
    process, scratch, printed = running
    assert len(printed.splitlines()) < 25, "vLLM's log, and warnings of libraries, are in a file"
    assert "api_server" in Path(re.search(r"vLLM starts; log: (\S+)", printed)[1]).read_text()
    family = [*descendants(process.pid), *keepers(process.pid)]
    commands = [" ".join(command_of(one)) for one in family]
    for part in ("api_server", "EngineCore", "lora_server serve"):
        assert any(part in one for one in commands), (part, commands)
    assert "lora-shard-0" in map(name_of, family)
    assert list(scratch.glob("lora-serve-*"))
    assert (HINT in printed) == (number == signal.SIGKILL), printed
    if number == signal.SIGTERM:
        check_commands(printed)
    process.send_signal(number)
    assert process.wait(HANG_SECONDS) == (-9 if number == signal.SIGKILL else 128 + number)
    all_gone(family)
    assert number == signal.SIGKILL or not list(scratch.glob("lora-*"))


def ended(tmp_path, port, *flags):
    environment = ENVIRON | {"TMPDIR": str(tmp_path)}
    process = command(port, *flags)
    return subprocess.run(process, capture_output=True, text=True, timeout=START_SECONDS, env=environment, check=False)


def test_vllm_that_dies_at_start_has_its_last_words():
    with tempfile.TemporaryDirectory() as scratch:
        done = ended(scratch, free_address().rpartition(":")[2], "--max-model-len", "none-at-all")
        assert done.returncode == 1 and "Traceback" not in done.stderr
        assert "error: vLLM ended with exit code 2 before it was ready; the end of its log:" in done.stderr
        assert "--max-model-len: " in done.stderr
        kept = Path(re.search(r"all of it: (\S+)", done.stderr)[1])
        assert "--max-model-len: " in kept.read_text()
        assert [path for path in Path(scratch).iterdir() if path.name.startswith("lora-")] == []


def test_a_port_that_is_taken_is_said_at_once():
    with socket.create_server(("127.0.0.1", 0)) as taken, tempfile.TemporaryDirectory() as scratch:
        port = str(taken.getsockname()[1])
        done = ended(scratch, port)
        assert done.returncode == 1
        assert f"error: port {port}: Address already in use" in done.stderr
