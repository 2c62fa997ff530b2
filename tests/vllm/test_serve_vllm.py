"""`python -m lora_server.demo.serve_vllm` leaves nothing behind, asked to end or killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

import pytest
from engines import ENVIRONMENT, START_SECONDS

from lora_server.demo import children
from lora_server.demo.launch import free_address
from tests.serving import HANG_SECONDS, all_gone, command_of, descendants, keepers, until


def answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"http://{address}/health", timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False


@pytest.fixture
def running(tmp_path):
    """(the process, where its directories are) once its API answers; vLLM and a tiny model."""
    address, log = free_address(), tmp_path / "log"
    command = [sys.executable, "-m", "lora_server.demo.serve_vllm", "--port", address.rpartition(":")[2]]
    with tempfile.TemporaryDirectory() as scratch, log.open("wb") as stream:  # pytest's own is too long for a socket
        environment = os.environ | ENVIRONMENT | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "TMPDIR": scratch}
        process = subprocess.Popen(children.own(command), stdout=stream, stderr=stream, env=environment)
        try:
            until(lambda: process.poll() is not None or answers(address), "vLLM's API answers", START_SECONDS)
            assert process.poll() is None, log.read_text(errors="replace")[-4000:]
            yield process, Path(scratch)
        finally:
            process.kill()
            process.wait(HANG_SECONDS)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left(running, number):
    process, scratch = running
    family = [*descendants(process.pid), *keepers(process.pid)]
    commands = [" ".join(command_of(one)) for one in family]
    for part in ("api_server", "EngineCore", "lora_server serve", "shard_main"):
        assert any(part in command for command in commands), (part, commands)
    assert list(scratch.glob("lora-serve-*"))
    process.send_signal(number)
    assert process.wait(HANG_SECONDS) == (-9 if number == signal.SIGKILL else 128 + number)
    all_gone(family)
    assert number == signal.SIGKILL or not list(scratch.glob("lora-*"))
