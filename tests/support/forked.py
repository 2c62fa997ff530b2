"""Our commands as tests start them: forked from a process that has their imports behind it, which take seconds each.

What runs is the same code with its own arguments, environment, directory, pipes, group and keeper, and it ends as an
interpreter does. What asks for more than that starts as ever, and so does what runs in a script, in a child of a child
or in another namespace: the demo's own server and engines, the TESTER of test_cleanup, hosts, wheels.
"""

import contextlib
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import msgspec
from typing_extensions import override

from lora_server.daemon.forks import ForkServer

SERVERS = (
    "tests.support.forked_main",
    "lora_server.cli",
    "lora_server.daemon.node",
    "lora_server.daemon.shard_main",
    "lora_server.daemon.controller_main",
)
ENGINES = (
    "tests.support.forked_main",
    "client_connector.transformers",
    "lora_server.demo.engine",
    "transformers.models.auto.modeling_auto",
    "transformers.models.mixtral.modeling_mixtral",
)
IMPORTS = {
    "lora_server": SERVERS,
    "tests.support.gpu.gpu_serve": SERVERS,
    "tests.support.gpu.gpu_engine": SERVERS,
    "tests.support.killed_controller": SERVERS,
    "lora_server.demo.engine": ENGINES,
    "lora_server.demo.profiled_engine": ENGINES,
    "tests.support.checking_engine": ENGINES,
    "tests.support.endless_engine": ENGINES,
}
IMPORT_SECONDS = 600.0  # for hangs alone: imports take 5 s of one CPU
SIMPLE = {"stdin", "stdout", "stderr", "text", "env", "cwd"}
# what no import reads; our CLI sets the one before the last, torch the last
OURS = ("LORA_SERVER_", "PYTEST_", "OTEL_", "GRPC_VERBOSITY", "TORCHINDUCTOR_CACHE_DIR")


class Job(msgspec.Struct):
    """The command that a forked process becomes; it reads this on its descriptor 3."""

    parent: int
    module: str
    arguments: list[str]
    environment: dict[str, str]
    directory: str


class ForkedPopen(subprocess.Popen):
    """A subprocess.Popen, with its pipes, that forks the fork server in place of starting an interpreter."""

    def __init__(self, server: ForkServer, command: list[str], **how) -> None:
        self._server = server
        super().__init__(command, **how)

    @override
    def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *more) -> None:
        pipes = more[3:9]  # startupinfo, creationflags, shell go before
        stdin, _, _, stdout, _, stderr = pipes
        given = [own if one == -1 else one for own, one in enumerate((stdin, stdout, stderr))]
        job = Job(
            os.getpid(), args[2], list(args[3:]), dict(os.environ if env is None else env), str(cwd or Path.cwd())
        )
        told, tell = os.pipe()
        try:
            self.pid = self._server.fork("tests.support.forked_main", [*given, told])
        except BaseException:
            os.close(tell)
            raise
        finally:
            os.close(told)
            self._close_pipe_fds(*pipes)
        self._child_created = True
        with os.fdopen(tell, "wb") as file:  # it is this process's child by now, and begins
            file.write(msgspec.json.encode(job))


class Forks:
    """Fork servers by what they have imported, each started when it is first asked."""

    def __init__(self) -> None:
        self._servers = {imports: ForkServer(imports, IMPORT_SECONDS) for imports in (SERVERS, ENGINES)}
        self._environment, self._directory = dict(os.environ), Path.cwd()

    def can(self, command: list[str], how: dict) -> bool:
        """Whether a fork is the same as a start."""
        if command[:2] != [sys.executable, "-m"] or command[2] not in IMPORTS or not how.keys() <= SIMPLE:
            return False
        known = Path.cwd() == self._directory and self._knows(os.environ)  # a server may be started here and now
        return known and self._knows(how.get("env") or os.environ)

    def _knows(self, environment: Mapping[str, str]) -> bool:
        changed = {name for name, _ in self._environment.items() ^ environment.items()}
        return all(name.startswith(OURS) for name in changed)

    @contextlib.contextmanager
    def instead_of(self, children: ModuleType):
        """`children.start` forks what can be."""
        start = children.start

        def fork(command, **how):
            if not self.can(command, how):
                return start(command, **how)
            return ForkedPopen(self._servers[IMPORTS[command[2]]], command, **how)

        fork.__wrapped__ = start
        children.start = fork
        try:
            yield
        finally:
            children.start = start

    def close(self) -> None:
        for server in self._servers.values():
            server.close()
