"""Floods, one after the other, beside a client that behaves and one that is idle."""

from __future__ import annotations

import contextlib
import math
import statistics
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil

from client_connector.remote import RemoteServer
from lora_server.demo import children, tiny
from lora_server.demo.launch import RunningServer, running_server
from lora_server.errors import LoraServerError
from tests.chaos.attacker import KINDS, OTHERS, servers
from tests.chaos.report import LEAK_DESCRIPTORS, MOST_TIMES, Held, Line
from tests.support.fleet import Engine
from tests.support.serving import descendants, status, until

START_SECONDS = 300.0  # for engines' processes, whose imports take a minute on a busy machine: not the server's doing
PROBE_SECONDS = 10.0  # on a busy machine
TRIES = 3
GEOMETRY = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 1, "num_local_experts": 4}


class Behaved(Engine):
    """The process of tests.chaos.caller, and its steps as they come."""

    def __init__(self, address: str, transport: str) -> None:
        super().__init__([sys.executable, "-m", "tests.chaos.caller", address, transport])

    def during(self, seconds: float, beside: str = "nothing") -> tuple[float, Counter[str]]:
        """The p99 of the steps that end from now on, and what came of them."""
        first, began = len(self.rounds), time.monotonic()
        until(
            lambda: time.monotonic() - began >= seconds and len(self.rounds) - first >= 100,
            f"100 steps beside {beside}",
            120 + seconds,
        )
        steps = self.rounds[first:]
        p99 = statistics.quantiles([float(str(one["seconds"])) for one in steps], n=100)[98]
        return p99, Counter(str(one["outcome"]) for one in steps)


def play(scratch: Path, transport: str, short: bool) -> tuple[list[Line], Held]:
    model = tiny.make_model("mixtral", **GEOMETRY)
    tiny.save_model(model, scratch / "base")
    for name in ("tenant", *(f"other-{index}" for index in range(OTHERS))):
        tiny.make_adapter(model, scratch / "adapters" / name, lora_rank=16, seed=0, targets="experts")
    flags = ["--base-model", str(scratch / "base"), "--adapters", str(scratch / "adapters"), "--layout", "ep2-pp1"]
    with running_server(scratch / "log", [*flags, "--lease-seconds", "10"]) as server:
        behaved, bystander = Behaved(server.address, transport), RemoteServer(server.address, transport).join(60.0)
        try:
            until(lambda: len(behaved.rounds) > 50, "the first steps", START_SECONDS)
            before = held(server)
            lines = [_flood(server, behaved, bystander, kind, *of[1:], short) for kind, of in KINDS.items()]
            until(lambda: status(server.address).clients <= 2, "the attackers' leases to end", 120)
            return lines, Held(f"floods, {transport}", before, _settled(server, before))
        except BaseException:
            print(server.tail(), file=sys.stderr)
            raise
        finally:
            behaved.stop()
            bystander.leave()


def _flood(server, behaved, bystander, kind, few, many, short) -> Line:  # type: ignore[no-untyped-def]
    """Repeat it up to TRIES times while p99 is over its bar: other work on the machine goes, the server's stays."""
    seconds, count = (4.0, few) if short else (10.0, many)
    line = Line(kind, count, ratio=math.inf, most=math.inf if short else MOST_TIMES)
    for number in range(1, TRIES + 1):
        alone, outcomes = behaved.during(seconds)
        with _attacked_by(server, kind, count):
            during, more = behaved.during(seconds, kind)
            if kind != "no descriptors left":
                more["untyped: no probe was answered"] += not _probed(server)
        line.answers += outcomes + more
        line.lost += more["lease"]
        line.ratio = min(line.ratio, during / alone)
        line.kind = kind if number == 1 else f"{kind}, the best of {number}"
        if line.ratio <= line.most:
            break
    try:
        bystander.check()
    except LoraServerError:
        line.lost += 1
    return line


def _probed(server: RunningServer) -> bool:
    """Whether both probes are answered at once."""
    with contextlib.suppress(OSError):
        for path in ("/livez", "/readyz"):
            with urllib.request.urlopen(f"http://{server.http}{path}", timeout=PROBE_SECONDS) as answer:
                answer.read()
        return True
    return False


@contextlib.contextmanager
def _attacked_by(server: RunningServer, kind: str, count: int) -> Iterator[None]:
    command = [sys.executable, "-m", "tests.chaos.attacker", kind, server.address, str(count)]
    attacker = subprocess.Popen(children.own(command), stdout=subprocess.PIPE, text=True)
    try:
        assert attacker.stdout is not None and attacker.stdout.readline() == "busy\n", kind
        yield
        assert attacker.poll() is None, f"{kind}: the attacker ended by itself"
    finally:
        attacker.kill()
        attacker.communicate(timeout=20)
        for process in descendants(server.process.pid):  # what it may have limited
            _, most = process.rlimit(psutil.RLIMIT_NOFILE)
            process.rlimit(psutil.RLIMIT_NOFILE, (most, most))


def _settled(server: RunningServer, before: tuple[int, int]) -> tuple[int, int]:
    """Wait until the server has closed the attackers' connections, or 30 s; return the resources that it then holds."""
    with contextlib.suppress(AssertionError):
        until(lambda: held(server)[1] - before[1] <= LEAK_DESCRIPTORS, "connections to be cleared away", 30)
    return held(server)


def held(server: RunningServer) -> tuple[int, int]:
    """Memory that a server's processes have to themselves, and descriptors; its fork server is not looked at."""
    family = [psutil.Process(server.process.pid), *servers(server.address)]
    return sum(one.memory_full_info().uss for one in family), sum(one.num_fds() for one in family)
