"""`lora-server serve` and engines as child processes, for the demo, tests and benches; they end with their parent."""

from __future__ import annotations

import contextlib
import http.client
import os
import random
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Self

from lora_server.demo import children
from lora_server.errors import LoraServerError, ServerUnavailableError

READY_SECONDS = 120.0
ENGINE_SECONDS = 600.0
PORTS, CLAIMS = range(20_000, 32_768), 32
_claims: deque[contextlib.ExitStack] = deque()


@dataclass
class RunningServer:
    """One node. `log` collects what it writes to stderr."""

    process: subprocess.Popen[bytes]
    address: str
    http: str
    log: Path

    def get(self, path: str) -> tuple[int, str]:
        """Send an HTTP GET; returns status and body, status 0 without an answer."""
        try:
            with urllib.request.urlopen(f"http://{self.http}{path}", timeout=5) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except (OSError, http.client.HTTPException):
            return 0, ""

    def wait_ready(self, seconds: float = READY_SECONDS) -> None:
        """Wait until /readyz is 200; raises ServerUnavailableError with the end of the log."""
        deadline = time.monotonic() + seconds
        while (answer := self.get("/readyz"))[0] != 200:
            hopeless = self.process.poll() is not None or "was refused" in answer[1]
            if hopeless or time.monotonic() > deadline:
                raise ServerUnavailableError(f"server at {self.address} did not get ready: {answer[1]}{self.tail()}")
            time.sleep(0.05)

    def tail(self) -> str:
        """Return the end of the log."""
        return self.log.read_text(errors="replace")[-2000:]

    def stop(self) -> int:
        """SIGTERM, then SIGKILL at the deadline; returns the exit code."""
        return children.stop(self.process)


def free_address(host: str = "127.0.0.1") -> str:
    """Find a port that is free at 127.0.0.1; returns it with `host`."""
    return f"{host}:{free_ports()}"


def free_ports(count: int = 1) -> int:
    """Find so many ports in a row that are free at 127.0.0.1; returns the first.

    A port that the system chose could be given to another process before the server binds it. These ports lie below the
    system's (on Linux it chooses from 32,768 on), and an abstract Unix socket claims each until this process ends or
    has made CLAIMS more claims, so that no other process of ours is given it meanwhile.
    """
    chance = random.SystemRandom()
    for _ in range(10 * len(PORTS)):
        first = chance.choice(PORTS[: len(PORTS) - count + 1])
        with contextlib.ExitStack() as claims, contextlib.suppress(OSError):
            for port in range(first, first + count):
                claims.enter_context(socket.socket(socket.AF_UNIX)).bind(f"\0lora-server-port-{port}")
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
            _claims.append(claims.pop_all())
            if len(_claims) > CLAIMS:
                _claims.popleft().close()
            return first
    raise LoraServerError(
        f"no {count} of the ports {PORTS.start} to {PORTS.stop - 1} in a row are free: end what has them"
    )


def launch(
    log: Path, *flags: str, host: str = "127.0.0.1", prefix: Sequence[str] = (), module: str = "lora_server"
) -> RunningServer:
    """Start a node with these `serve` flags; does not wait. `prefix` runs it on another host."""
    address, http = free_address(host), free_address(host)
    command = [*prefix, sys.executable, "-m", module, "serve", "--listen", address, "--http", http, *flags]
    with log.open("wb") as stream:
        process = children.start(command, stderr=stream, stdout=stream, stdin=subprocess.DEVNULL)
    return RunningServer(process, address, http, log)


@contextlib.contextmanager
def running_server(log: Path, flags: Sequence[str], module: str = "lora_server") -> Iterator[RunningServer]:
    """A ready server, stopped at the end of the block."""
    server = launch(log, *flags, module=module)
    try:
        server.wait_ready()
        yield server
    finally:
        server.stop()


class EngineProcess:
    """An engine: a module that reads its job as a line, and writes results as lines; it ends after ENGINE_SECONDS."""

    def __init__(
        self, what: str, module: str, log: Path, environment: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        """`what`: what errors begin with. `log`: of what the engine writes to stderr, written anew. `environment` is
        added to this process's."""
        self._what, self._log, command = what, log, [sys.executable, "-m", module]
        with log.open("wb") as stream:
            self._process = children.start(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stream, env={**os.environ, **environment}
            )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        self._deadline = threading.Timer(ENGINE_SECONDS, self._process.kill)
        self._deadline.start()

    def write(self, line: bytes) -> None:
        """Send a line. Where the engine has ended, `line` says why."""
        with contextlib.suppress(BrokenPipeError):
            self._stdin.write(line + b"\n")
            self._stdin.flush()

    def line(self) -> bytes:
        """Wait for a line; raises LoraServerError with the end of the log if the engine ended, or at the deadline."""
        line: bytes = self._stdout.readline()
        if not line.endswith(b"\n"):
            reason = "failed" if self._deadline.is_alive() else f"did not finish within {ENGINE_SECONDS:g} s"
            log = self._log.read_text(errors="replace")[-3000:]
            raise LoraServerError(f"{self._what} {reason}:\n{log}")
        return line

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._deadline.cancel()
        with self._process:  # closes its pipes
            children.stop(self._process)
