"""Numbers in the form that people read and write. JSON, logs and metrics keep raw numbers."""

from __future__ import annotations

import re
from typing import NamedTuple

from lora_server.errors import ConfigError


def size(nbytes: float) -> str:
    """Return bytes with a unit and about three digits: 1.4 GiB, 31.4 MiB, 512 KiB."""
    value, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 999.5:
            break
        value, unit = value / 1024, larger
    return f"{value:,.0f} {unit}" if unit == "B" or value >= 99.95 else f"{value:.1f} {unit}"


def count(number: float) -> str:
    """Return a number with thousands separators: 28,470."""
    return f"{number:,.0f}"


_UNITS = {"": 1, "b": 1} | {
    f"{prefix}{kind}": base**power
    for power, prefix in enumerate("kmgt", start=1)
    for kind, base in (("ib", 1024), ("b", 1000))
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*|%)")


class Size(NamedTuple):
    """A size: a number of bytes, or a share in [0, 1] of what is available; the other field is 0."""

    nbytes: int = 0
    share: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Size:
        """Return the size of a text such as 40GiB or 50%; raises ConfigError."""
        match = _SIZE.fullmatch(text.strip())
        unit = match[2].lower() if match else ""
        if match and unit == "%" and float(match[1]) <= 100:
            return cls(share=float(match[1]) / 100)
        if match and unit in _UNITS:
            return cls(nbytes=int(float(match[1]) * _UNITS[unit]))
        raise ConfigError(f"got {text!r}, expected bytes such as 40GiB, or at most 100%")

    def of(self, available: int) -> int:
        """Return the size in bytes, out of so many available."""
        return int(available * self.share) if self.share else self.nbytes

    def __str__(self) -> str:
        return f"{self.share * 100:g}%" if self.share else str(self.nbytes)
