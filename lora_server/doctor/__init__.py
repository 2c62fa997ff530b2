"""Checks of a machine before a node starts there, each with a cure.

machine    the files that checks read, findings   host       processors, memory, limits, clock, kernel
gpu        GPUs, NVSHMEM, InfiniBand
software   Python and packages                   network    ports and directories of a configuration
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from types import MappingProxyType

from lora_server.doctor import gpu, host, network, software
from lora_server.doctor.machine import Finding, Machine, Outcome, failed, ok
from lora_server.doctor.network import NodeResources
from lora_server.errors import LoraServerError

__all__ = ["Finding", "Machine", "NodeResources", "Outcome", "diagnose"]


def diagnose(
    machine: Machine, resources: NodeResources, starts: Mapping[str, Callable[[], str]] = MappingProxyType({})
) -> list[Finding]:
    """Run all checks, in the order of a start. A check that crashes is a finding, too.

    `starts`: the checks of a configuration's start, by name; each returns what it found, or raises a LoraServerError.
    """
    checks: list[tuple[str, Callable[[], Iterable[Finding]]]] = [
        ("python", software.python),
        ("packages", software.packages),
        ("processors", lambda: host.processors(machine)),
        ("memory", lambda: host.memory(machine)),
        ("shared memory", lambda: host.shared_memory(machine)),
        ("limits", lambda: host.limits(machine)),
        ("kernel", lambda: host.kernel(machine)),
        ("clock", lambda: host.clock(machine)),
        ("gpu", lambda: gpu.gpus(machine)),
        ("nvshmem", lambda: gpu.nvshmem(machine)),
        ("infiniband", lambda: gpu.infiniband(machine)),
        ("ports", lambda: network.ports(resources)),
        ("directories", lambda: network.directories(resources)),
        *((name, partial(_start, name, check)) for name, check in starts.items()),
    ]
    return [finding for name, check in checks for finding in _ask(name, check)]


def _ask(name: str, check: Callable[[], Iterable[Finding]]) -> list[Finding]:
    try:
        return list(check())
    except Exception as error:  # an odd machine must not hide what the other checks found
        return [Finding(name, Outcome.WARNING, f"not known: {type(error).__name__}: {error}", "look at it by hand")]


def _start(name: str, check: Callable[[], str]) -> Iterator[Finding]:
    try:
        yield ok(name, check())
    except LoraServerError as error:
        yield failed(name, str(error), "correct the configuration: a node does not start with it")
