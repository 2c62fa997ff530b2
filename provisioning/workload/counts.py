"""Counts files: calls per adapter, as JSON or CSV."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from provisioning.arrays import Floats
from provisioning.inputs import InputError, parsed
from provisioning.workload.workload import from_counts


def read_counts(path: str | Path) -> Floats:
    """Popularity from a JSON list or object {adapter: count}, or a CSV of `adapter,count` lines or of bare counts.

    A CSV may have one line of headings. Raises InputError naming --counts, the file and, in a CSV, the line.
    """
    file = Path(path)
    where = f"--counts: {file}"
    try:
        text = file.read_text(encoding="utf-8-sig")
        values = _json_counts(text, where) if file.suffix.lower() == ".json" else list(_csv_counts(text, where))
    except (OSError, UnicodeDecodeError, ValueError, csv.Error) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{where} cannot be used: {error}; expected JSON or CSV `adapter,count`") from None
    if not values:
        raise InputError(f"{where} holds no counts; expected JSON or CSV `adapter,count`")
    return from_counts(values, where)


def _json_counts(text: str, where: str) -> list[float]:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        _distinct([name for name, _ in pairs], where)
        return dict(pairs)

    found = parsed(text, where, once)
    if not isinstance(found, (list, dict)):
        raise InputError(f"{where}: got {type(found).__name__}, expected a list of counts or an object adapter: count")
    named = found.items() if isinstance(found, dict) else enumerate(found)
    for name, value in named:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise InputError(f"{where}: count of {name!r}: got {value!r}, expected a number of calls")
    return list(found.values()) if isinstance(found, dict) else found


def _csv_counts(text: str, where: str) -> Iterator[float]:
    rows = [
        (number, row) for number, row in enumerate(csv.reader(text.splitlines()), start=1) if any(map(str.strip, row))
    ]
    if rows and _headings(rows[0][1]):
        del rows[0]
    _distinct([row[0].strip() for _, row in rows if len(row) == 2], where)
    for number, row in rows:
        if len(row) > 2 or (len(row) == 2 and not row[0].strip()) or len(row) != len(rows[0][1]):
            raise InputError(
                f"{where} line {number}: got {','.join(row)!r}, expected `adapter,count`, or a count alone"
            )
        try:
            yield float(row[-1])
        except ValueError:
            raise InputError(f"{where} line {number}: got {row[-1]!r}, expected a number of calls") from None


def _headings(row: list[str]) -> bool:
    """`adapter,calls total`, but not `law,3O`, which is a slip."""
    last = row[-1].strip()
    try:
        float(last)
    except ValueError:
        return last.replace(" ", "_").replace("-", "_").isidentifier()
    return False


def _distinct(names: list[str], where: str) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise InputError(f"{where}: adapter {name!r} is counted twice; give one count per adapter")
        seen.add(name)
