"""Helpers for tests with real server processes."""

from __future__ import annotations

import contextlib
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable

import psutil

from lora_server.demo import children
from lora_server.demo.launch import RunningServer
from lora_server.wire import lora_server_pb2 as pb
from lora_server.wire import lora_server_pb2_grpc as rpc
from lora_server.wire.rpc import open_channel

ANYWHERE = ("--adapter-root", "/")
HANG_SECONDS = 120.0  # a limit is for hangs: what takes seconds may take a minute on a busy machine


def cli(*arguments: str, seconds: float = HANG_SECONDS) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lora_server", *arguments]
    with children.start(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            said, errors = process.communicate(timeout=seconds)
        finally:
            process.kill()
    return subprocess.CompletedProcess(command, process.returncode, said, errors)


def status(address: str) -> pb.StatusReply:
    with open_channel(address) as channel:
        return rpc.ServerStub(channel).Status(pb.StatusRequest(), timeout=10)


def settled_steps(address: str, seconds: float = 2.5) -> list[int]:
    """Steps that each shard has served, once two reports in a row agree (they come about once a second)."""
    seen, since = None, time.monotonic()
    deadline = since + 30
    while time.monotonic() < since + seconds:
        steps = [shard.stats.steps for shard in status(address).shards]
        if steps != seen:
            seen, since = steps, time.monotonic()
        assert time.monotonic() < deadline, "the shards are never idle"
        time.sleep(0.1)
    assert seen is not None
    return seen


def until(condition: Callable[[], object], what: str, seconds: float = 60.0) -> None:
    """Poll something that another process or thread makes true; a deadline, not a guess."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.02)


def shard_processes(address: str) -> list[psutil.Process]:
    """Of a server whose shards are up, by index."""
    return [psutil.Process(shard.pid) for shard in status(address).shards]


def descendants(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def kill(server: RunningServer) -> None:
    """All of a node at once, as if its machine had gone."""
    family = descendants(server.process.pid)
    server.process.kill()
    for process in family:
        process.kill()
    server.process.wait(10)


def free_base(count: int) -> int:
    """The first of so many ports in a row that nobody listens on at 127.0.0.1 now; none that is ever chosen for one."""
    for base in random.sample(range(20000, 30000), 100):
        with contextlib.ExitStack() as probes, contextlib.suppress(OSError):
            for port in range(base, base + count):
                probes.enter_context(socket.create_server(("127.0.0.1", port)))
            return base
    raise AssertionError(f"no {count} free ports in a row")


def listening(process: psutil.Process) -> set[int]:
    """The ports at which a process listens, or takes datagrams."""
    waiting = (psutil.CONN_LISTEN, psutil.CONN_NONE)
    return {one.laddr.port for one in process.net_connections("inet") if one.status in waiting}


def command_of(process: psutil.Process) -> list[str]:
    """Empty for one that has ended."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def name_of(process: psutil.Process) -> str:
    """What a process of a node calls itself; empty for one that has ended."""
    try:
        return process.name()
    except psutil.Error:
        return ""


def keepers(pid: int) -> list[psutil.Process]:
    """Those of the children of a process (lora_server/demo/children.py); they are nobody's descendants."""
    return [one for one in psutil.process_iter() if command_of(one)[3:5] == [children.__file__, str(pid)]]


def all_gone(processes: list[psutil.Process]) -> None:
    """Wait until none of them runs; one that nobody has reaped does not."""

    def gone(process: psutil.Process) -> bool:
        try:
            return process.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    assert processes
    until(lambda: all(map(gone, processes)), f"none of {processes} is left", HANG_SECONDS)


def start_engine(model: str, server: str, *names: str) -> subprocess.Popen[str]:
    """An endless engine that has done a few steps already."""
    command = [sys.executable, "-m", "tests.support.endless_engine", model, server, *names]
    process = children.start(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for _ in range(3):
        assert process.stdout.readline() == "step\n"
    return process
