"""Numbers as people read them. JSON, logs and metrics keep them raw."""

from __future__ import annotations


def size(nbytes: float) -> str:
    """Three digits and a unit: 1.4 GiB, 31.4 MiB, 512 KiB."""
    value, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 999.5:
            break
        value, unit = value / 1024, larger
    return f"{value:,.0f} {unit}" if unit == "B" or value >= 99.95 else f"{value:.1f} {unit}"


def count(number: float) -> str:
    """28,470."""
    return f"{number:,.0f}"
