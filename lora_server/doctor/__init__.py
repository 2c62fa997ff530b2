"""What of this machine would keep a node from serving, or from serving well, and what to do about each.

finding    what was found, and its cure          host       processors, memory, limits, clock, kernel
machine    where it is read                      gpu        GPUs, NVSHMEM, InfiniBand
software   Python and packages                   network    ports and directories of a configuration
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from lora_server.doctor import gpu, host, network, software
from lora_server.doctor.finding import Finding, State
from lora_server.doctor.machine import Machine
from lora_server.doctor.network import Places

__all__ = ["Finding", "Machine", "Places", "State", "diagnose"]


def diagnose(machine: Machine, places: Places) -> list[Finding]:
    """Every finding, in the order of a start. A check that fails itself is a finding too."""
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
        ("ports", lambda: network.ports(places)),
        ("directories", lambda: network.directories(places)),
    ]
    return [finding for name, check in checks for finding in _ask(name, check)]


def _ask(name: str, check: Callable[[], Iterable[Finding]]) -> list[Finding]:
    try:
        return list(check())
    except Exception as error:  # an odd machine must not hide what the other checks found
        return [Finding(name, State.WARNING, f"not known: {type(error).__name__}: {error}", "look at it by hand")]
