"""Processes that start in milliseconds: forked from a server process that has imported their modules.

The first fork server is a fork of the node, taken while that has one thread. A dead one is replaced by a fresh
interpreter when the next process is started. Forked processes share the pages of the imports.

A fork has the forking thread alone, and every lock as it was: so the server has one thread, no device and no channel.
It forks twice, and the process between ends at once: the second becomes the node's own child, which the node can wait
for even after the server's end.

multiprocessing's forkserver was tried instead, with four shards in five alternating starts on two busy cores. Until the
node served it took 3.9 s of CPU, not 2.9, and 383 MiB of memory (PSS), not 318, since it imports apart from the node;
wall time was no shorter. Its children are its own: when it is killed, every sentinel reports an end (code 255), and the
node restarts a controller and shards that were serving. Nothing bounds the wait for a stuck server, a failed import is
ignored, and a node that is killed leaves the server's socket directory behind.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import importlib
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn

import structlog

from lora_server import logs
from lora_server.daemon.forked import Forked, Piped
from lora_server.errors import ConfigError, ServerUnavailableError
from lora_server.timings import Timings

IMPORT_SECONDS = 120.0  # of a fresh server, on a busy machine
UP = b"up"
MAX_DESCRIPTORS = 4
GPUS = "/dev/nvidia"
_PR_SET_CHILD_SUBREAPER = 36
log = structlog.get_logger()


def limit_threads(threads: int) -> None:
    """Limit numerical libraries' threads here and in children; call it before numpy or torch is imported."""
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(threads)
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # numpy's own, which start when it is imported


def call_myself(name: str) -> None:
    """Set the name in ps -e and top, 15 characters at most; the command line stays the fork server's."""
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(name)


class ForkServer:
    """Starts processes that run `main()` of a module, as children of this one. Thread-safe.

    A child is in a process group of its own: Ctrl-C goes to the parent, which stops its children in order.
    """

    def __init__(
        self,
        modules: Sequence[str],
        import_seconds: float = IMPORT_SECONDS,
        fork_seconds: float = Timings.fork,
    ) -> None:
        """Import `modules` before the first fork, a fresh server within `import_seconds`; replace a server that does
        not fork within `fork_seconds`."""
        self._modules, self._import_seconds, self._fork_seconds = modules, import_seconds, fork_seconds
        self._lock = threading.Lock()
        self._closed = False
        self._socket: socket.socket | None = None
        self._server: Forked | None = None

    def fork_off(self) -> None:
        """Fork the first server off this process, which imports the modules too and has one thread.

        Raises ConfigError where that cannot be done.
        """
        _get_ready(self._modules)
        self._socket, theirs = _pair(self._fork_seconds)
        pid = os.fork()
        if pid == 0:
            self._socket.close()
            os.setpgid(0, 0)
            _never_return(functools.partial(_answer, theirs))
        theirs.close()
        self._server = Forked(pid)

    def start(self, module: str) -> Piped:
        """Start a child with pipes for stdin and stdout. Raises ServerUnavailableError."""
        stdin, stdout = os.pipe(), os.pipe()
        try:
            pid = self.fork(module, [stdin[0], stdout[1]])
        except ServerUnavailableError:
            os.close(stdin[1])
            os.close(stdout[0])
            raise
        finally:
            os.close(stdin[0])
            os.close(stdout[1])
        return Piped(pid, stdin[1], stdout[0])

    def fork(self, module: str, descriptors: Sequence[int]) -> int:
        """Start a child with these as its descriptors 0, 1, ...; return its pid. Raises ServerUnavailableError."""
        with self._lock:
            if self._closed:
                raise ServerUnavailableError("fork server: closed")
            try:
                return self._ask(module, descriptors)
            except (OSError, ValueError) as error:
                if self._server is not None:
                    self._server.kill()
                raise ServerUnavailableError(f"fork server: {module} was not forked ({error})") from error

    def _ask(self, module: str, descriptors: Sequence[int]) -> int:
        if self._socket is None or self._server is None or self._server.poll() is not None:
            self._socket = self._start_anew()
        with _adopting():
            socket.send_fds(self._socket, [module.encode()], descriptors)
            return int(self._socket.recv(100))

    def _start_anew(self) -> socket.socket:
        if self._server is not None:
            log.warning("the fork server died; starting another", status=self._server.returncode)
        if self._socket is not None:
            self._socket.close()
        ours, theirs = _pair(self._fork_seconds)
        with theirs:
            theirs.set_inheritable(True)
            command = [sys.executable, "-m", __name__, str(theirs.fileno()), *self._modules]
            self._server = Forked(os.posix_spawn(sys.executable, command, os.environ, setpgroup=0))
        try:
            ours.settimeout(self._import_seconds)
            ours.recv(len(UP))
            ours.settimeout(self._fork_seconds)
        except OSError:
            ours.close()
            raise
        return ours

    def close(self) -> None:
        """Stop the server; children that run go on."""
        self._closed = True
        if self._server is not None:
            self._server.kill()  # so that a start does not wait for it
        with self._lock:
            if self._server is not None:
                self._server.kill()  # which may be another
                self._server.wait()
            if self._socket is not None:
                self._socket.close()


def _pair(seconds: float) -> tuple[socket.socket, socket.socket]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(seconds)
    return ours, theirs


@contextlib.contextmanager
def _adopting() -> Iterator[None]:
    """Become the parent of orphaned descendants, in the place of the first process."""
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, 0)


def _get_ready(modules: Sequence[str]) -> None:
    """Import the modules and prepare this process to be forked. Raises ConfigError."""
    for module in modules:
        importlib.import_module(module)
    while (descriptor := os.open(os.devnull, os.O_RDWR)) < 3:  # without stdin, say: nothing else gets its number
        pass
    os.close(descriptor)
    opened = [str(one.readlink()) for one in Path("/proc/self/fd").iterdir() if one.is_symlink()]
    if devices := [path for path in opened if path.startswith(GPUS)]:
        raise ConfigError(
            f"a GPU is in use before a shard starts: got {devices[0]} opened by an import, expected none, since CUDA "
            "does not survive a fork; find what opens it with: strace -f -e trace=openat lora-server serve"
        )
    tasks = [(one / "comm").read_text().strip() for one in Path("/proc/self/task").iterdir()]
    if len(tasks) > 1:
        log.warning(
            "threads run before the fork of shards; what they hold locked stays locked in those: start none by "
            "sitecustomize or a .pth file",
            threads=tasks,
        )
    gc.freeze()  # a collection would write to every object, and so unshare its page
    sys.stdout.flush()
    sys.stderr.flush()


def _answer(asked: socket.socket) -> None:
    """Fork one process per request, until the node is gone."""
    call_myself("lora-forks")
    for number in (signal.SIGINT, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    while True:
        module, descriptors, _, _ = socket.recv_fds(asked, 1000, MAX_DESCRIPTORS)
        if not module:
            return
        try:
            reply = str(_fork(functools.partial(_become, module.decode(), descriptors, asked)))
        except (OSError, ValueError) as error:
            reply = str(error)
        for descriptor in descriptors:
            os.close(descriptor)
        asked.send(reply.encode())


def _fork(run: Callable[[], None]) -> int:
    """Fork a process that runs `run`, as a grandchild without a living parent; return its pid."""
    told, tell = os.pipe()
    between = os.fork()
    if between == 0:
        _never_return(lambda: _leave(run, told, tell))
    os.close(tell)
    os.waitpid(between, 0)
    try:
        return int(os.read(told, 100))
    finally:
        os.close(told)


def _leave(run: Callable[[], None], told: int, tell: int) -> None:
    """Run in the process between server and child: fork the child, tell its pid, and end."""
    pid = os.fork()
    if pid == 0:
        os.close(told)
        os.close(tell)
        _never_return(run)
    os.write(tell, str(pid).encode())


def _become(module: str, descriptors: Sequence[int], asked: socket.socket) -> None:
    asked.close()
    os.setpgid(0, 0)
    for number, descriptor in enumerate(descriptors):  # each is above those that are still to be replaced
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)  # noqa: SIM115
    importlib.import_module(module).main()


def _never_return(run: Callable[[], None]) -> NoReturn:
    """Run, then end this process: the caller's code goes on in another."""
    code = 1
    try:
        run()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def main() -> None:
    """Entry point of a fresh server: python -m lora_server.daemon.forks SOCKET MODULE..."""
    logs.configure()
    asked = socket.socket(fileno=int(sys.argv[1]))
    _get_ready(sys.argv[2:])
    asked.send(UP)
    _answer(asked)


if __name__ == "__main__":
    main()
