"""How much memory this process may still take of its host, or of its container."""

from __future__ import annotations

from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
_FILES = (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"))


def available_bytes() -> int:
    """What the system says is available, or less where the control group has a limit."""
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    found = {words[0]: int(words[1]) * 1024 for words in lines}
    return max(0, min(found["MemAvailable:"], *_of_control_group()))


def _of_control_group() -> list[int]:
    left = [1 << 62]
    for limit, used in _FILES:
        try:
            left.append(int((_CGROUP / limit).read_text()) - int((_CGROUP / used).read_text()))
        except (OSError, ValueError):  # not this version of it, or "max"
            continue
    return left
