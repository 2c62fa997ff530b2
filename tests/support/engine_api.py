"""An engine's OpenAI server in a process of its own, and HTTP to it."""

import contextlib
import json
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from lora_server.demo import children

START_SECONDS, CALL_SECONDS = 300.0, 300.0


class Logged:
    """A process with a log, that ends with its block."""

    log: Path

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-4000:]

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        raise NotImplementedError


class EngineApi(Logged):
    """A server that is up when GET /health is answered with 200."""

    def __init__(self, address: str, command: list[str], environment: dict[str, str], log: Path) -> None:
        self.address, self.log = address, log
        with log.open("wb") as stream:
            self.process = subprocess.Popen(
                children.own(command), stdout=stream, stderr=stream, stdin=subprocess.DEVNULL, env=environment
            )
        try:
            self._wait()
        except BaseException:
            self.close()
            raise

    def _wait(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while True:
            with contextlib.suppress(OSError):
                if self.request("GET", "/health")[0] == 200:
                    return
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the engine's server did not start: {self.tail()}")
            time.sleep(0.2)

    def request(self, method: str, path: str, body: dict[str, Any] | None = None, token: str = "") -> tuple[int, Any]:
        """Status, and the JSON or text of the answer."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
        request = urllib.request.Request(f"http://{self.address}{path}", data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=CALL_SECONDS) as answer:
                status, text = answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            status, text = error.code, error.read().decode()
        try:
            return status, json.loads(text)
        except ValueError:
            return status, text

    def close(self) -> None:
        children.stop(self.process, 60)
