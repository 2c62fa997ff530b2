"""Counts files: calls per adapter, and how long their outputs are where that is known, as JSON or CSV."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from provisioning.inputs import InputError, normalised, parsed, positive
from provisioning.workload.requests import Lengths
from provisioning.workload.workload import Workload

_FORM = "JSON or CSV `adapter,count` or `adapter,count,mean_output_tokens`"
_OBJECT = '{"count": 3, "mean_output_tokens": 256}'
_MOST_TOKENS = 2**31
_Row = tuple[str, float, float | None]  # name, empty where there is none; calls; mean output tokens


def read_counts(file: Path) -> Workload:
    """Read popularity, and the adapters' mean output tokens if the file has them, for all adapters or for none.

    JSON: a list or an object by adapter, of counts or of {"count": ..., "mean_output_tokens": ...}. CSV: lines of
    `adapter,count`, `adapter,count,mean_output_tokens` or bare counts; a line of headings may come first. Raises
    InputError naming --counts, the file and, in a CSV, the line.
    """
    where = f"--counts: {file}"
    try:
        text = file.read_text(encoding="utf-8-sig")
        rows = list(_json_rows(text, where) if file.suffix.lower() == ".json" else _csv_rows(text, where))
    except (OSError, UnicodeDecodeError, ValueError, csv.Error) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{where} cannot be used: {error}; expected {_FORM}") from None
    if not rows:
        raise InputError(f"{where} holds no counts; expected {_FORM}")
    popularity = normalised([calls for _, calls, _ in rows], where)
    lengths = [tokens for *_, tokens in rows if tokens is not None]
    names = tuple(name for name, *_ in rows) if rows[0][0] else ()
    if not lengths:
        return Workload(popularity=popularity, source=str(file), names=names)
    if len(lengths) < len(rows):
        raise InputError(f"{where}: mean output tokens of {len(lengths)} of {len(rows)} adapters; give all or none")
    tokens = np.array(lengths)
    return Workload(
        popularity=popularity,
        tokens=tokens,
        lengths=Lengths(mean_tokens=float(popularity @ tokens), source=str(file)),
        source=str(file),
        names=names,
    )


def _json_rows(text: str, where: str) -> Iterator[_Row]:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        _distinct([name for name, _ in pairs], where)
        return dict(pairs)

    found = parsed(text, where, once)
    if not isinstance(found, (list, dict)):
        raise InputError(f"{where}: got {type(found).__name__}, expected a list of counts or an object adapter: count")
    for name, value in found.items() if isinstance(found, dict) else enumerate(found):
        fields = value if isinstance(value, dict) else {"count": value}
        if set(fields) - {"mean_output_tokens"} != {"count"}:
            raise InputError(f"{where}: {name!r}: got {', '.join(fields) or 'nothing'}, expected such as {_OBJECT}")
        for what, number in fields.items():
            if isinstance(number, bool) or not isinstance(number, (int, float)):
                raise InputError(f"{where}: {what} of {name!r}: got {number!r}, expected a number of calls or tokens")
        tokens = fields.get("mean_output_tokens")
        mean = None if tokens is None else _mean(tokens, f"{where}: mean_output_tokens of {name!r}")
        yield name if isinstance(name, str) else "", fields["count"], mean


def _csv_rows(text: str, where: str) -> Iterator[_Row]:
    rows = [
        (number, row) for number, row in enumerate(csv.reader(text.splitlines()), start=1) if any(map(str.strip, row))
    ]
    if rows and _headings(rows[0][1]):
        del rows[0]
    _distinct([row[0].strip() for _, row in rows if len(row) > 1], where)
    for number, row in rows:
        line = f"{where} line {number}"
        if len(row) > 3 or (len(row) > 1 and not row[0].strip()) or len(row) != len(rows[0][1]):
            raise InputError(
                f"{line}: got {','.join(row)!r}, expected `adapter,count`, or with `,mean_output_tokens`, or a count"
            )
        calls = _number(row[min(len(row) - 1, 1)], line, "calls")
        tokens = _mean(_number(row[2], line, "tokens"), line) if len(row) == 3 else None
        yield row[0].strip() if len(row) > 1 else "", calls, tokens


def _number(text: str, line: str, what: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InputError(f"{line}: got {text!r}, expected a number of {what}") from None


def _mean(tokens: float, where: str) -> float:
    return positive(tokens, where, _MOST_TOKENS)


def _headings(row: list[str]) -> bool:
    """Tell whether a row holds headings, as `adapter,calls total`; `law,3O` is not one but a slip."""
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
