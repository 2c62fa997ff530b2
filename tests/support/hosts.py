"""Hosts on this machine: network namespaces on a switch, with wires that can be cut, made slow, or lose frames.

Each namespace lives as long as a process in it, and those end with the tests: nothing stays behind.
"""

from __future__ import annotations

import contextlib
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from lora_server.demo import children

SECONDS = 20.0
HEADER_BYTES = 66  # of a packet: Ethernet's, IP's and TCP's, whose timestamps Linux has on


def run(*command: str) -> str:
    """Run a command; returns what it prints. Raises CalledProcessError."""
    return subprocess.run(command, check=True, capture_output=True, timeout=SECONDS, text=True).stdout


class Namespace:
    """A network namespace. `prefix` runs a command there."""

    def __init__(self) -> None:
        self._holder = children.start(["unshare", "--net", "sh", "-c", "echo; exec sleep infinity"], stdout=-1)
        assert self._holder.stdout is not None
        self._holder.stdout.readline()  # from here on it is in its namespace
        self.pid = str(self._holder.pid)
        self.prefix = ("nsenter", f"--net=/proc/{self.pid}/ns/net")
        self.run("ip", "link", "set", "lo", "up")

    def run(self, *command: str) -> str:
        """Run a command there; see `run`."""
        return run(*self.prefix, *command)

    def close(self) -> None:
        """End the process that holds it."""
        self._holder.kill()
        self._holder.wait(SECONDS)
        assert self._holder.stdout is not None
        self._holder.stdout.close()


@dataclass(frozen=True)
class Host:
    """A host at `address`; its wire ends in the switch as `link`."""

    address: str
    link: str
    inside: Namespace
    switch: Namespace

    @property
    def prefix(self) -> tuple[str, ...]:
        """Runs a command on this host."""
        return self.inside.prefix

    @contextlib.contextmanager
    def is_cut(self) -> Iterator[None]:
        """Cut the wire for the block: frames both ways are lost."""
        self.switch.run("ip", "link", "set", self.link, "down")
        try:
            yield
        finally:
            self.switch.run("ip", "link", "set", self.link, "up")

    def carried(self) -> tuple[int, int]:
        """Return the bytes that its wire has carried to it, and from it, without the headers of packets."""
        (link,) = json.loads(self.inside.run("ip", "-s", "-json", "link", "show", "eth0"))
        ways = (link["stats64"][way] for way in ("rx", "tx"))
        received, sent = (way["bytes"] - HEADER_BYTES * way["packets"] for way in ways)
        return received, sent

    def narrow(self, rate: str, burst: str = "256kb") -> None:
        """Limit the wire to a rate, both ways; `1gbit`, say. As much as `burst` passes at once after a rest."""
        limit = ("root", "tbf", "rate", rate, "burst", burst, "latency", "50ms")
        self.switch.run("tc", "qdisc", "replace", "dev", self.link, *limit)
        self.inside.run("tc", "qdisc", "replace", "dev", "eth0", *limit)

    def widen(self) -> None:
        """Undo `narrow`."""
        self.switch.run("tc", "qdisc", "del", "dev", self.link, "root")
        self.inside.run("tc", "qdisc", "del", "dev", "eth0", "root")


class Switch:
    """A switch, which this process is connected to as well."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack, self._count = stack, 0
        self._inside = self._namespace()
        self._network = _free_network()
        own = f"lu{self._inside.pid}"
        self._inside.run("ip", "link", "add", "switch", "type", "bridge")
        self._inside.run("ip", "link", "set", "switch", "up")
        run("ip", "link", "add", own, "type", "veth", "peer", "name", "uplink", "netns", self._inside.pid)
        self._inside.run("ip", "link", "set", "uplink", "master", "switch", "up")
        run("ip", "addr", "add", f"{self._network}.254/24", "dev", own)
        run("ip", "link", "set", own, "up")

    def _namespace(self) -> Namespace:
        made = Namespace()
        self._stack.callback(made.close)
        return made

    def host(self, *, loss: float = 0.0, delay_ms: float = 0.0) -> Host:
        """Connect another host, under an address that none had before; its wire may lose and delay frames, each way."""
        self._count += 1
        host = Host(f"{self._network}.{self._count}", f"wire{self._count}", self._namespace(), self._inside)
        if loss or delay_ms:
            self._bad_wire(host, loss, delay_ms)
        else:
            end = ("peer", "name", "eth0", "netns", host.inside.pid)
            run("ip", "link", "add", host.link, "netns", self._inside.pid, "type", "veth", *end)
        self._inside.run("ip", "link", "set", host.link, "master", "switch", "up")
        host.inside.run("ip", "addr", "add", f"{host.address}/24", "dev", "eth0")
        host.inside.run("ip", "link", "set", "eth0", "up")
        return host

    def _bad_wire(self, host: Host, loss: float, delay_ms: float) -> None:
        ends = [f"b{host.inside.pid}", f"c{host.inside.pid}"]
        command = [sys.executable, "-m", "tests.support.bad_wire", *ends, str(loss), str(delay_ms)]
        wire = children.start(command, stdout=subprocess.PIPE)
        self._stack.callback(children.stop, wire)
        assert wire.stdout is not None
        with wire.stdout:
            assert wire.stdout.readline() == b"up\n"
        run("ip", "link", "set", ends[0], "netns", self._inside.pid, "name", host.link)
        run("ip", "link", "set", ends[1], "netns", host.inside.pid, "name", "eth0")


def _free_network() -> str:
    taken = run("ip", "-o", "addr")
    free = [f"10.213.{third}" for third in range(1, 255) if f" 10.213.{third}." not in taken]
    return random.SystemRandom().choice(free)


@contextlib.contextmanager
def switch() -> Iterator[Switch]:
    """A switch; gone with its hosts at the end of the block."""
    with contextlib.ExitStack() as stack:
        yield Switch(stack)


def _missing() -> str:
    try:
        with switch() as found:
            found.host().narrow("1gbit")
            found.host(loss=0.01)
    except (OSError, subprocess.SubprocessError, AssertionError) as error:
        return f"no network namespaces, bridges and TAP devices here (root, util-linux, iproute2): {error!r}"
    return ""


MISSING = _missing()  # why there can be no hosts here; empty where there can
