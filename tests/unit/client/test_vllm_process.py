"""What is said of a vLLM that does not get ready; a shell that writes vLLM's lines stands in its place."""

import io
import os

import pytest
from rich.console import Console

from lora_server.demo import children
from lora_server.demo.launch import free_address
from lora_server.demo.vllm_process import LAST_LINES, VllmProcess
from lora_server.errors import ServerUnavailableError

REASON = "(Worker pid=7) ERROR 11-22 06:05:27 [executor.py:953] lora_server.errors.ConfigError: the reason"


@pytest.mark.parametrize(("after", "seconds", "words"), [
    ("exit 3", 60.0, "vLLM ended with exit code 3 before it was ready; the end of its log:"),
    ("exec sleep 600", 2.0, "vLLM: not ready within 2 s; the end of its log:"),
])  # fmt: skip
def test_last_words(tmp_path, after, seconds, words):
    """The last lines, and the error that its processes logged long before."""
    script = f"echo '{REASON}'; for i in $(seq 100); do echo line-$i; done; {after}"
    vllm = VllmProcess(["bash", "-c", script], os.environ, free_address(), tmp_path / "log")
    try:
        with pytest.raises(ServerUnavailableError) as raised:
            vllm.wait_ready(Console(file=io.StringIO()), seconds)
    finally:
        children.stop(vllm.process)
    said, *lines = str(raised.value).splitlines()
    assert said == words
    assert lines == [*(f"line-{i}" for i in range(101 - LAST_LINES, 101)), "lora_server.errors.ConfigError: the reason"]
