"""Processors, memory, limits, kernel, clock."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from lora_server.doctor.machine import Finding, Machine, failed, ok, warning
from lora_server.host_memory import available_bytes, container_bytes, system_bytes
from lora_server.units import size

GIB = 1 << 30
LEAST_MEMORY, LITTLE_MEMORY = GIB // 2, 4 * GIB
LEAST_DESCRIPTORS, FEW_DESCRIPTORS = 256, 4096  # a shard takes 4 per client, a controller 1 per client and shard
OLDEST_KERNEL = (5, 4)
WIDE = {"avx512_bf16": "AVX-512 BF16", "amx_bf16": "AMX BF16", "avx512f": "AVX-512", "avx2": "AVX2", "asimd": "NEON"}


def processors(machine: Machine) -> Iterator[Finding]:
    """Check how many processors this process may use, and their vector units."""
    quota = _quota(machine)
    count = machine.processors if quota is None else min(machine.processors, quota)
    text = f"{machine.processors} for this process" + (f", limited to {quota:g} by its container" if quota else "")
    if count < 2:
        yield warning("processors", text, "give it 2 or more: controller and shards are processes of their own")
    else:
        yield ok("processors", text)
    flags = set(re.findall(r"\w+", machine.read("/proc/cpuinfo") or ""))
    wide = [label for flag, label in WIDE.items() if flag in flags]
    if wide:
        yield ok("vector units", ", ".join(wide))
    else:
        cure = "with --device cpu choose processors that have AVX2 or more; GPUs do not mind"
        yield warning("vector units", "none that is wide", cure)


def _quota(machine: Machine) -> float | None:
    words = (machine.read("/sys/fs/cgroup/cpu.max") or "").split()
    return int(words[0]) / int(words[1]) if len(words) == 2 and words[0] != "max" else None


def memory(machine: Machine) -> Iterator[Finding]:
    """Check the memory that is left, of the system and of the container."""
    free, left = available_bytes(machine.read), container_bytes(machine.read)
    text = f"{size(system_bytes(machine.read))} available"
    text += "" if left is None else f", {size(left)} left to this container"
    if free < LEAST_MEMORY:
        yield failed("memory", text, "end other processes, or raise the container's limit: a shard takes 0.3 GiB bare")
    elif free < LITTLE_MEMORY:
        cure = "raise the limit, or give --device-pool: by default shards share 80 % of it for adapters"
        yield warning("memory", text, cure)
    else:
        yield ok("memory", text)


def shared_memory(machine: Machine) -> Iterator[Finding]:
    """Check /dev/shm. The server does not use it; engines on the same host do."""
    try:
        there = os.statvfs(machine.path("/dev/shm"))
    except OSError:
        yield warning("/dev/shm", "not there", "mount a tmpfs there: we do not need it, but engines' workers do")
        return
    free = there.f_bavail * there.f_frsize
    if free < GIB:
        cure = "docker run --shm-size 8g, or an emptyDir of medium Memory: engines' workers need it, we do not"
        yield warning("/dev/shm", f"{size(free)} free", cure)
    else:
        yield ok("/dev/shm", f"{size(free)} free (for engines; we do not use it)")


def limits(machine: Machine) -> Iterator[Finding]:
    """Check the limits of open files and of locked memory."""
    most = machine.limits["NOFILE"]
    text = "no limit" if most < 0 else f"at most {most}"
    cure = "ulimit -n 65536, LimitNOFILE= of systemd, or docker run --ulimit nofile=65536"
    if 0 <= most < LEAST_DESCRIPTORS:
        yield failed("open files", text, cure)
    elif 0 <= most < FEW_DESCRIPTORS:
        yield warning("open files", f"{text}, enough for {most // 8} clients", cure)
    else:
        yield ok("open files", text)
    locked = machine.limits["MEMLOCK"]
    if locked >= 0 and machine.entries("/sys/class/infiniband"):
        cure = "ulimit -l unlimited, LimitMEMLOCK=infinity, or the capability IPC_LOCK: RDMA registers memory"
        yield warning("locked memory", f"at most {size(locked)}", cure)
    else:
        yield ok("locked memory", "no limit" if locked < 0 else f"at most {size(locked)}; RDMA alone needs more")


def kernel(machine: Machine) -> Iterator[Finding]:
    """Check that the kernel has memfd seals and pidfd_open."""
    found = re.match(r"(\d+)\.(\d+)", machine.release)
    if found is None or (int(found[1]), int(found[2])) < OLDEST_KERNEL:
        cure = f"take one of {'.'.join(map(str, OLDEST_KERNEL))} or newer: pidfd_open tells when an engine is gone"
        yield failed("kernel", machine.release, cure)
    else:
        yield ok("kernel", machine.release)


def clock(machine: Machine) -> Iterator[Finding]:
    """Check that the clock is synchronised: certificates and logs of several nodes need it."""
    if machine.clock_synchronised is None:
        yield ok("clock", "the kernel does not say whether it is synchronised")
    elif machine.clock_synchronised:
        yield ok("clock", "synchronised")
    else:
        cure = "run chrony or systemd-timesyncd on the host: logs of several nodes cannot be laid side by side"
        yield warning("clock", "not synchronised", cure)
