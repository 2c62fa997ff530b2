"""An actor of Ray that is one node of a server. It imports little, since Ray imports this anew for every actor."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util import get_node_ip_address

from lora_server.address import Address

NAMESPACE = "lora-server"  # of Ray
ASK_SECONDS, LOOK_SECONDS, AGAIN_SECONDS = 10.0, 1.0, 2.0
REFUSED, MOST_REFUSED = 2, 5  # the exit code of settings that cannot be; a port may be another process's for a while
# sent SIGTERM when the actor's process ends; the thread that starts it lives as long
_TIED = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 15); os.execv(sys.argv[1], sys.argv[1:])"


class NodeActor:
    """An actor: one node of a server, kept running."""

    def __init__(self, name: str, settings: str, secret: str, rank: int) -> None:
        """`settings`: JSON of those that all nodes share. `secret`: their join token."""
        self._name, self._shared, self._rank = name, settings, rank
        self._host = get_node_ip_address()
        self._token = _private_file(secret)
        self._stopping = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._refused = 0
        self._thread = threading.Thread(target=self._keep, daemon=True, name="node")
        self._thread.start()

    def settings(self) -> str:
        """Return the settings that the node was started with."""
        return self._shared

    def controller(self) -> str:
        """Return where node 0 listens, if this is it."""
        return str(Address(self._host, Address.parse(json.loads(self._shared)["listen"]).port))

    def pid(self) -> int:
        """Return the pid of the node's process; 0 while it has none."""
        process = self._process
        return process.pid if process is not None and process.poll() is None else 0

    def niceness(self) -> int:
        """Return the niceness that Ray gave to this process, and so to the node's."""
        return os.nice(0)

    def is_hopeless(self) -> bool:
        """Return whether the node refuses its settings."""
        return self._refused >= MOST_REFUSED

    def stop(self) -> None:
        """Stop the node's process, and wait for its end."""
        self._stopping.set()
        self._thread.join()
        self._token.unlink(missing_ok=True)

    def _keep(self) -> None:
        while not self._stopping.is_set() and not self.is_hopeless():
            controller = self.controller() if not self._rank else self._ask_controller()
            if controller:
                code = self._run(controller)
                self._refused = self._refused + 1 if code == REFUSED else 0
            self._stopping.wait(AGAIN_SECONDS)

    def _run(self, controller: str) -> int:
        """Run the process until it ends, this actor stops, or node 0 is elsewhere. Returns its exit code."""
        command = [sys.executable, "-m", "lora_server", "serve", "--config", "/dev/stdin"]
        process = subprocess.Popen([sys.executable, "-c", _TIED, *command], stdin=subprocess.PIPE)
        self._process = process
        assert process.stdin is not None
        with suppress(BrokenPipeError), process.stdin as stdin:
            stdin.write(json.dumps(self._own(controller)).encode())
        while process.poll() is None:
            if self._stopping.wait(LOOK_SECONDS) or (self._rank and self._ask_controller() not in ("", controller)):
                self._end(process)
        return process.returncode

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        process.send_signal(signal.SIGTERM)
        try:  # the node gives its children so long, and then ends itself
            process.wait(json.loads(self._shared)["timings"]["stop"] + AGAIN_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _own(self, controller: str) -> dict[str, Any]:
        settings: dict[str, Any] = json.loads(self._shared)
        listen, http = (Address.parse(settings[name]) for name in ("listen", "http"))
        return settings | {
            "launcher": "none",
            "node_rank": self._rank,
            "controller": controller if self._rank else None,
            "listen": str(listen._replace(host=self._host)),
            "http": str(http._replace(host=self._host)),
            "advertise": self._host,
            "join_token_file": str(self._token),
        }

    def _ask_controller(self) -> str:
        """Return where node 0 listens; empty while its actor does not answer."""
        try:
            first = ray.get_actor(name_of(self._name, 0), NAMESPACE)
            return str(ray.get(first.controller.remote(), timeout=ASK_SECONDS))
        except (RayError, ValueError):  # no such actor
            return ""


def name_of(server: str, rank: int) -> str:
    """Return the name of a node's actor."""
    return f"{server}-node-{rank}"


def _private_file(text: str) -> Path:
    descriptor, path = tempfile.mkstemp(prefix="lora-server-join-")
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    return Path(path)
