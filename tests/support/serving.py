"""Helpers for tests with real server processes."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import psutil

from client_connector.transformers import attach
from lora_server.demo import children
from lora_server.demo.engine import generate
from lora_server.demo.launch import RunningServer, launch
from lora_server.wire import lora_server_pb2 as pb
from lora_server.wire import lora_server_pb2_grpc as rpc
from lora_server.wire.listing import all_pages
from lora_server.wire.rpc import call, open_channel
from tests.support.workload import NEW_TOKENS, Workload

ANYWHERE = ("--adapter-root", "/")
HANG_SECONDS = 300.0  # a limit is for hangs: what takes seconds may take a minute on a busy machine


def cli(*arguments: str, seconds: float = HANG_SECONDS) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lora_server", *arguments]
    with children.start(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            said, errors = process.communicate(timeout=seconds)
        finally:
            process.kill()
    return subprocess.CompletedProcess(command, process.returncode, said, errors)


def until(condition: Callable[[], object], what: str, seconds: float = HANG_SECONDS) -> None:
    """Poll something that another process or thread makes true; a deadline, not a guess."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.02)


def heard(sock: socket.socket, last: bytes = b"") -> bytes:
    """What a peer says until it ends the connection, or with `last`."""
    said = b""
    with contextlib.suppress(ConnectionResetError):
        while not (last and said.endswith(last)) and (more := sock.recv(1 << 16)):
            said += more
    return said


def has_ended(sock: socket.socket) -> bool:
    """Whether a peer has ended the connection by now; what it said before goes."""
    sock.setblocking(False)
    try:
        heard(sock)
    except BlockingIOError:
        return False
    return True


def flags(work: Workload, *more: str) -> list[str]:
    """Flags of `lora-server serve` for a workload."""
    return ["--base-model", str(work.base), "--adapters", str(work.adapters), *more]


def status(address: str) -> pb.StatusReply:
    with open_channel(address) as channel:
        return rpc.ServerStub(channel).Status(pb.StatusRequest(), timeout=HANG_SECONDS / 2)


def reached(address: str) -> pb.StatusReply | None:
    """The server's status; None while its controller is away."""
    try:
        return status(address)
    except grpc.RpcError:
        return None


def complete(address: str) -> pb.StatusReply | None:
    """The server's status; None while its controller is away or it is not ready."""
    reply = reached(address)
    return reply if reply is not None and reply.ready else None


def ask(address: str, method: str, **fields: object) -> Any:
    """Call a method of the Adapters service; raises the server's error."""
    kind = {"List": "ListAdaptersRequest"}.get(method, f"{method}AdapterRequest")
    with open_channel(address) as channel:
        stub = getattr(rpc.AdaptersStub(channel), method)
        return call(stub, getattr(pb, kind)(**fields), server=address, seconds=HANG_SECONDS)


def listed(address: str) -> dict[str, pb.Adapter]:
    """Adapters by name, in the order of handles, but for versions that drain."""
    with open_channel(address) as channel:
        stub = rpc.AdaptersStub(channel)
        pages = all_pages(lambda one: call(stub.List, one, server=address, seconds=HANG_SECONDS))
    return {one.name: one for one in pages.adapters if one.state != "draining"}


def generates(work: Workload, kind: str) -> bool:
    """Whether the model's tokens, with the adapters that it holds now, are PEFT's for this adapter of the workload."""
    index = work.names.index(kind)
    (answer,) = generate(work.model, [work.batch[index]], NEW_TOKENS)
    return answer.tokens == work.expected[index].tokens


def answers(lora: Any, work: Workload, name: str, kind: str = "") -> bool:
    """Whether adapter `name` answers with PEFT's tokens for the workload's adapter `kind`, or of its own name."""
    with lora.adapters([name]):
        return generates(work, kind or name)


def wait_successor(server: RunningServer, pid: int) -> None:
    """Wait until another controller than `pid` has a complete server."""
    until(lambda: (reply := complete(server.address)) and reply.pid != pid, "another controller has a complete server")
    server.wait_ready()


def serves(address: str, work: Workload, name: str, kind: str = "", transport: str = "auto") -> bool:
    """Whether an engine that joins now gets the answers of an adapter: see `answers`."""
    with attach(work.model, address, transport=transport, timeout_seconds=HANG_SECONDS) as lora:
        return answers(lora, work, name, kind)


def kill_controller(server: RunningServer) -> None:
    """SIGKILL a controller; return when its successor has a complete server."""
    before = status(server.address).pid
    os.kill(before, signal.SIGKILL)
    wait_successor(server, before)


def kill_shard(server: RunningServer, shard: int) -> None:
    """SIGKILL a shard; return when another process is up in its place."""
    pid = status(server.address).shards[shard].pid
    os.kill(pid, signal.SIGKILL)
    until(lambda: (reply := complete(server.address)) and reply.shards[shard].pid != pid, f"shard {shard} is replaced")


@contextlib.contextmanager
def suspended(*pids: int) -> Iterator[None]:
    """Stop processes by SIGSTOP in the block; behind it those that have not ended go on."""
    try:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
        yield
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def stop(server: RunningServer) -> int:
    """SIGTERM; the exit code of a node, which has as long as a busy machine needs."""
    return children.stop(server.process, HANG_SECONDS)


class Nodes:
    """The nodes of one server. The first that starts is node 0; the others join it, the last rank as often as asked."""

    def __init__(self, directory: Path, *common: str, count: int = 2) -> None:
        self.directory, self.common, self.count, self.all = directory, common, count, list[RunningServer]()

    def start(self, *own: str, joins: bool = True, **how: Any) -> RunningServer:
        """Start the next node with flags of its own; does not wait."""
        rank = min(len(self.all), self.count - 1)
        more = ("--node-rank", str(rank), "--controller", self.all[0].address) if self.all and joins else ()
        log = self.directory / f"log{len(list(self.directory.glob('log*')))}"
        self.all.append(launch(log, *self.common, "--nodes", str(self.count), *more, *own, **how))
        return self.all[-1]

    def stop(self) -> list[int]:
        """Exit codes; the last that started ends first."""
        return [stop(one) for one in reversed(self.all)]

    def __enter__(self) -> Nodes:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()


def settled_steps(address: str, seconds: float = 2.5) -> list[int]:
    """Steps that each shard has served, once two reports in a row agree (they come about once a second)."""
    seen, since = None, time.monotonic()
    deadline = since + HANG_SECONDS
    while time.monotonic() < since + seconds:
        steps = [shard.stats.steps for shard in status(address).shards]
        if steps != seen:
            seen, since = steps, time.monotonic()
        assert time.monotonic() < deadline, "the shards are never idle"
        time.sleep(0.1)
    assert seen is not None
    return seen


def shard_processes(address: str) -> list[psutil.Process]:
    """Return the shards' processes of a server, by index. The shards must be up."""
    return [psutil.Process(shard.pid) for shard in status(address).shards]


def descendants(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def kill(server: RunningServer) -> None:
    """Kill every process of a node at once, as if its machine had gone."""
    family = descendants(server.process.pid)
    server.process.kill()
    for process in family:
        process.kill()
    server.process.wait(HANG_SECONDS)


def listening(process: psutil.Process) -> set[int]:
    """The ports at which a process listens, or takes datagrams."""
    waiting = (psutil.CONN_LISTEN, psutil.CONN_NONE)
    return {one.laddr.port for one in process.net_connections("inet") if one.status in waiting}


def command_of(process: psutil.Process) -> list[str]:
    """A process's command line; empty once it has ended."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def name_of(process: psutil.Process) -> str:
    """Return the name that a node's process gave itself; empty once it has ended."""
    try:
        return process.name()
    except psutil.Error:
        return ""


def metric(text: str, series: str) -> float:
    """Find a sample in Prometheus' text; 0 before its first one."""
    found = re.search(rf"^{re.escape(series)} (\S+)$", text, re.MULTILINE)
    return float(found[1]) if found else 0.0


def shard_pids(address: str) -> list[int]:
    """Return the pids of the shards, by index; none while the server is not complete."""
    reply = complete(address)
    return [shard.pid for shard in reply.shards] if reply else []


def is_gone(process: psutil.Process) -> bool:
    """Whether it runs no more; a zombie does not."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def keepers(pid: int) -> list[psutil.Process]:
    """The keepers of a process's children (lora_server/demo/children.py); they are no descendants of it."""
    return [one for one in psutil.process_iter() if command_of(one)[3:5] == [children.__file__, str(pid)]]


def all_gone(processes: list[psutil.Process]) -> None:
    """Wait until none of them runs."""
    assert processes
    until(lambda: all(map(is_gone, processes)), f"none of {processes} is left")


def start_engine(model: str, server: str, *names: str) -> subprocess.Popen[str]:
    """An endless engine that has done a few steps already."""
    command = [sys.executable, "-m", "tests.support.endless_engine", model, server, *names]
    process = children.start(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for _ in range(3):
        assert process.stdout.readline() == "step\n"
    return process
