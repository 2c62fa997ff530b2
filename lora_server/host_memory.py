"""The memory that is still available to this process on its host, or in its container."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

Read = Callable[[str], str | None]  # a file's text; None where there is none
_CGROUP = "/sys/fs/cgroup"
_NO_LIMIT = 2**62  # what version 1 of control groups says is larger: pages that a signed word of bytes can count
_FILES = (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"))


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text()
    except OSError:
        return None


def available_bytes(read: Read = _read) -> int:
    """Return the available bytes of the system, or of the control group if its limit leaves fewer."""
    system, left = system_bytes(read), container_bytes(read)
    return system if left is None else min(system, left)


def system_bytes(read: Read = _read) -> int:
    """Return the system's available bytes (MemAvailable); raises OSError."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB", read("/proc/meminfo") or "", re.MULTILINE)
    if found is None:
        raise OSError("/proc/meminfo has no MemAvailable")
    return int(found[1]) * 1024


def container_bytes(read: Read = _read) -> int | None:
    """Return what is left of the control group's limit; None if it has no limit."""
    for names in _FILES:
        limit, used = ((read(f"{_CGROUP}/{name}") or "").strip() for name in names)
        if limit.isdigit() and used.isdigit() and int(limit) < _NO_LIMIT:
            return max(0, int(limit) - int(used))
    return None
