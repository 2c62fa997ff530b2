"""Two hosts on one machine: network namespaces behind a bridge, whose links can be cut. Needs root and iproute2."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

NETWORK = "10.213.77"


def missing() -> str:
    """Why there can be no such hosts here; empty where there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    lacking = [tool for tool in ("ip", "nsenter") if shutil.which(tool) is None]
    if lacking:
        return f"{', '.join(lacking)} not installed (iproute2, util-linux)"
    probe = f"lora-probe-{os.getpid()}"
    if _try("ip", "netns", "add", probe):
        return "this kernel, or container, allows no network namespaces"
    allowed = not _try("ip", "link", "add", probe[:11] + "b", "type", "bridge")
    _try("ip", "link", "del", probe[:11] + "b")
    _try("ip", "netns", "del", probe)
    return "" if allowed else "this kernel, or container, allows no bridges"


def _try(*command: str) -> int:
    return subprocess.run(command, capture_output=True, timeout=20, check=False).returncode


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=20)


@dataclass(frozen=True)
class Host:
    """`prefix` runs a command there."""

    name: str
    address: str
    link: str

    @property
    def prefix(self) -> tuple[str, ...]:
        return ("nsenter", f"--net=/run/netns/{self.name}")

    def cut(self) -> None:
        _ip("link", "set", self.link, "down")

    def mend(self) -> None:
        _ip("link", "set", self.link, "up")


@contextlib.contextmanager
def hosts(count: int) -> Iterator[list[Host]]:
    """On one switch, which this process is connected to as well; gone at the end of the block."""
    tag = f"{os.getpid() % 100000}"
    bridge, made = f"lb{tag}", []
    with contextlib.ExitStack() as stack:
        _ip("link", "add", bridge, "type", "bridge")
        stack.callback(_try, "ip", "link", "del", bridge)
        _ip("addr", "add", f"{NETWORK}.254/24", "dev", bridge)
        _ip("link", "set", bridge, "up")
        for index in range(count):
            host = Host(f"lora-{tag}-{index}", f"{NETWORK}.{index + 1}", f"lv{tag}-{index}")
            _ip("netns", "add", host.name)
            stack.callback(_try, "ip", "netns", "del", host.name)
            _ip("link", "add", host.link, "type", "veth", "peer", "name", "eth0", "netns", host.name)
            stack.callback(_try, "ip", "link", "del", host.link)
            _ip("link", "set", host.link, "master", bridge, "up")
            _ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", "eth0")
            _ip("-n", host.name, "link", "set", "lo", "up")
            _ip("-n", host.name, "link", "set", "eth0", "up")
            made.append(host)
        yield made
