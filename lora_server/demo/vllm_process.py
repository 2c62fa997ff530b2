"""vLLM's OpenAI server as a child process, with its log in a file."""

from __future__ import annotations

import json
import re
import subprocess
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from lora_server.address import Address, why_not
from lora_server.demo import children
from lora_server.errors import ConfigError, ServerUnavailableError

READY_SECONDS = 1800.0  # a large model loads for long
LAST_LINES = 30
_TAIL_BYTES = 65536
_SAID = re.compile(r"INFO [\d-]+ [\d:]+ \[[^\]]+\] +(\S.*)")
_FAILED = re.compile(r"ERROR [\d-]+ [\d:]+ \[[^\]]+\] ([\w.]+(?:Error|Exception)\b.*)")


class VllmProcess:
    """Started at once. `log` None: vLLM writes where this process does."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], address: str, log: Path | None) -> None:
        self.address, self.log = address, log
        stream = None if log is None else log.open("wb")
        self.process = subprocess.Popen(
            children.own(command), env=dict(environment), stdin=subprocess.DEVNULL, stdout=stream, stderr=stream
        )
        if stream is not None:
            stream.close()

    def wait_ready(self, console: Console, seconds: float = READY_SECONDS) -> None:
        """Wait until /health is 200, with a line of progress in a terminal.

        Raises ServerUnavailableError with vLLM's last lines where it ends before, or at the deadline.
        """
        began = time.monotonic()
        with console.status("vLLM starts") as status:
            if self.log is None:
                status.stop()  # vLLM's own lines are there
            while not _answers(self.address):
                passed = time.monotonic() - began
                if self.process.poll() is not None:
                    raise ServerUnavailableError(self.last_words("before it was ready"))
                if passed > seconds:
                    raise ServerUnavailableError(f"vLLM: not ready within {seconds:g} s{self._tail()}")
                line = f"vLLM starts, {passed:.0f} s: {self._doing()}"
                status.update(Text(line, no_wrap=True, overflow="ellipsis"))
                time.sleep(0.2)

    def dtype_said(self, model: Path) -> str:
        """Say in which dtype vLLM computes, by its log, and what to do where the model's files have another."""
        said = None if self.log is None else re.search(rb"\bdtype=torch\.(\w+)", self.log.read_bytes())
        if said is None:
            return ""
        config = json.loads((model / "config.json").read_text()) if (model / "config.json").exists() else {}
        computes, stored = said[1].decode(), config.get("dtype") or config.get("torch_dtype")
        hint = f"; the model's files are {stored}: to serve them so, add --dtype {stored} to ARGS"
        return f", in {computes}{hint if stored and stored != computes else ''}"

    def last_words(self, when: str) -> str:
        """Describe a process that has ended: exit code and the end of its log."""
        return f"vLLM ended with exit code {self.process.returncode} {when}{self._tail()}"

    def _end_of_log(self) -> list[str]:
        if self.log is None:
            return []
        with self.log.open("rb") as stream:
            stream.seek(max(0, self.log.stat().st_size - _TAIL_BYTES))
            return re.split(r"[\r\n]+", stream.read().decode(errors="replace").strip())

    def _doing(self) -> str:
        said = [found[1] for line in self._end_of_log() if (found := _SAID.search(line))]
        return said[-1] if said else "imports"

    def _tail(self) -> str:
        """Return the end of the log, then the errors that its processes logged: the reason may be far above the end."""
        lines = self._end_of_log()
        errors = dict.fromkeys(found[1] for line in lines if (found := _FAILED.search(line)))
        shown = "\n".join([*lines[-LAST_LINES:], *errors])
        return f"; the end of its log:\n{shown}" if shown else ""


def _answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"http://{address}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def require_free(address: str) -> None:
    """Check that the port is free; raises ConfigError, since another listener would look like vLLM."""
    place = Address.parse(address)
    try:
        place.listen(1).close()
    except OSError as error:
        cure = "stop what listens there, or give another (make: PORT=, else --port)"
        raise ConfigError(f"port {place.port}: {why_not(error)}; {cure}") from None
