"""Numbers as people read them: thousands separators, a unit that suits, no exponents. JSON has the bare ones."""

from __future__ import annotations

import math
from collections.abc import Sequence

from provisioning.simulation.measure import Estimate

_BLOCKS = "▁▂▃▄▅▆▇█"
_SPANS = ((86400, "days"), (3600, "h"), (60, "min"), (1, "s"))
_TIMES = ((1e6, "s"), (1e3, "ms"), (1.0, "us"))
_BYTES = ((2.0**40, "TiB"), (2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "bytes"))


def number(value: float, digits: int = 4) -> str:
    """Format a number: whole from 1,000 on, below it this many significant digits: 21,900; 8.555; 0.4946; 512."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    decimals = max(digits - 1 - math.floor(math.log10(abs(value))), 0)
    text = f"{value:,.{min(decimals, 12)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def time(us: float) -> str:
    """Format microseconds: 370 us, 30.1 ms, 2.5 s."""
    size, unit = _scale(us, _TIMES)
    return f"{number(us / size, 3)} {unit}"


def times(seconds: Estimate) -> str:
    """Format a time with its interval, in one unit: 30.1 ms [29.9, 30.3]."""
    size, unit = _scale(seconds.mean * 1e6, _TIMES)
    mean, low, high = (number(value * 1e6 / size, 3) for value in (seconds.mean, seconds.low, seconds.high))
    return f"{mean} {unit} [{low}, {high}]"


def rate(share: Estimate) -> str:
    """Format a rate with its interval: 0.9531 [0.9502, 0.9560]."""
    return f"{share.mean:.4f} [{share.low:.4f}, {share.high:.4f}]"


def size(num_bytes: float) -> str:
    """Format a number of bytes, as 1.69 GiB."""
    scale, unit = _scale(num_bytes, _BYTES)
    return f"{number(num_bytes / scale)} {unit}"


def count(value: int, noun: str) -> str:
    """Format a count of things, as 1 GPU, 2 GPUs."""
    return f"{value:,} {noun}{'' if value == 1 else 's'}"


def sparkline(values: Sequence[float], columns: int = 48) -> str:
    """Draw values as a line of blocks, the highest value full; a column shows the highest of its values."""
    step = max(math.ceil(len(values) / columns), 1)
    highest = [max(values[start : start + step]) for start in range(0, len(values), step)]
    top = max(highest) or 1.0
    return "".join(_BLOCKS[min(int(value / top * len(_BLOCKS)), len(_BLOCKS) - 1)] for value in highest)


def moment(seconds: float) -> str:
    """Format a time since the start of a trace: 90 s, 12.5 min, 6.25 h, 3.5 days."""
    size, unit = next(pair for pair in _SPANS if seconds >= 2 * pair[0] or pair[0] == 1)
    return f"{number(seconds / size, 3)} {unit}"


def _scale(value: float, scales: tuple[tuple[float, str], ...]) -> tuple[float, str]:
    return next((pair for pair in scales if value >= pair[0]), scales[-1])
