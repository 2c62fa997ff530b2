"""Traces: CSV or JSONL with timestamp, adapter, input and output tokens, under the usual names.

Azure (`TIMESTAMP,ContextTokens,GeneratedTokens`) and Mooncake (`timestamp` in ms, `input_length`,
`output_length`, `hash_ids`) carry no adapter: adapters are then drawn from Zipf(s, N) with a seed.
A directory of `chunk-*-trace.csv` is ServeGen's, see `servegen`.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from provisioning.arrays import Ints
from provisioning.inputs import InputError, normalised, parsed
from provisioning.workload.requests import Lengths, Requests
from provisioning.workload.workload import Workload, zipf

_NAMES = {
    "timestamp": ("timestamp", "timestamp_s", "time", "arrival_s", "arrival_time", "arrived_at"),
    "adapter": ("adapter", "adapter_id", "adapter_name", "lora", "lora_name", "lora_id", "model", "client_id"),
    "input": ("input_tokens", "input_length", "contexttokens", "prompt_tokens", "num_prefill_tokens", "request_tokens"),
    "output": (
        "output_tokens",
        "output_length",
        "generatedtokens",
        "completion_tokens",
        "num_decode_tokens",
        "response_tokens",
    ),
}


@dataclass(frozen=True, kw_only=True)
class ZipfAdapters:
    """Rule that draws adapters for a trace that names none."""

    num_adapters: int = 512
    skew: float = 1.2
    seed: int = 0


def load(file: Path, adapters: ZipfAdapters | None = None, window_s: float | None = None) -> Workload:
    """Load the workload of a trace file or a ServeGen directory; `window_s` is the length of the directory's peak.

    Raises InputError naming file and line.
    """
    if file.is_dir():
        from provisioning.workload import servegen

        return servegen.load(file).workload(window_s)
    drawn = adapters or ZipfAdapters()
    requests, named = read(file, drawn)
    if named:
        source = f"{file}, adapters as it names them"
        return Workload(
            popularity=normalised(requests.counts(), "trace"),
            tokens=requests.mean_tokens(),
            lengths=Lengths.of(requests.output_tokens, source),
            source=source,
            trace=requests,
            names=requests.names,
        )
    return Workload(
        popularity=zipf(drawn.skew, drawn.num_adapters),
        lengths=Lengths.of(requests.output_tokens, str(file)),
        source=f"{file}; no adapter ids, drawn from Zipf({drawn.skew:g}, {drawn.num_adapters}) with seed {drawn.seed}",
        trace=requests,
        zipf_skew=drawn.skew,
    )


def read(file: Path, adapters: ZipfAdapters | None = None) -> tuple[Requests, bool]:
    """Read (requests in order of arrival, starting at 0; whether the trace named the adapters)."""
    drawn = adapters or ZipfAdapters()
    try:
        with file.open(encoding="utf-8-sig", newline="") as stream:
            is_json = file.suffix.lower() in (".jsonl", ".ndjson", ".json")
            rows = list(_json_rows(stream, file) if is_json else _csv_rows(stream, file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"--trace: {file} cannot be read: {error}") from None
    if not rows:
        raise InputError(f"--trace: {file} holds no requests; expected lines with timestamp, adapter and tokens")
    time_s, names, inputs, outputs = zip(*rows, strict=True)
    if min(time_s) == max(time_s):
        raise InputError(
            f"--trace: {file}: its {len(rows)} request(s) have one timestamp, so that no rate follows; "
            "give a trace with several, or its calls per adapter as --counts"
        )
    if max(time_s) - min(time_s) > _MOST_SPAN_S:
        raise InputError(
            f"--trace: {file}: timestamps from {min(time_s):g} to {max(time_s):g} s, expected at most "
            f"{_MOST_SPAN_S:.0e} s between them; is one of them of another unit?"
        )
    order = np.argsort(np.array(time_s), kind="stable")
    distinct, adapter = _adapters(names, drawn, file)
    arrival_s = np.array(time_s)[order]
    requests = Requests(
        arrival_s=arrival_s - arrival_s[0],
        adapter=adapter[order],
        output_tokens=np.array(outputs, dtype=np.int64)[order],
        input_tokens=np.array(inputs, dtype=np.int64)[order],
        num_adapters=len(distinct) or drawn.num_adapters,
        names=tuple(distinct),
    )
    return requests, bool(distinct)


def _adapters(names: tuple[str | None, ...], drawn: ZipfAdapters, file: Path) -> tuple[list[str], Ints]:
    """Return (names in order of the index, index per row); draw adapters if the trace names none."""
    known = sorted({name for name in names if name is not None})
    if not known:
        rng, popularity = np.random.default_rng(drawn.seed), zipf(drawn.skew, drawn.num_adapters)
        return [], rng.choice(drawn.num_adapters, len(names), p=popularity).astype(np.int64)
    if None in names:
        raise InputError(f"--trace: {file} names the adapter of some requests only; give it for all or for none")
    index = {name: position for position, name in enumerate(known)}
    return known, np.array([index[name] for name in names if name is not None], dtype=np.int64)


_MOST_SPAN_S = 1e9  # 32 years
_Row = tuple[float, str | None, int, int]


def _csv_rows(stream: Any, file: Path) -> Iterator[_Row]:
    for fields in (reader := csv.DictReader(stream)):
        if None in fields or None in fields.values():
            raise InputError(f"--trace: {file} line {reader.line_num}: the number of columns is not the header's")
        yield _row({key.strip().lower(): value for key, value in fields.items()}, file, reader.line_num)


def _json_rows(stream: Any, file: Path) -> Iterator[_Row]:
    for number, line in enumerate(stream, start=1):
        if not line.strip():
            continue
        fields = parsed(line, f"--trace: {file} line {number}")
        if not isinstance(fields, dict):
            raise InputError(f"--trace: {file} line {number}: got {type(fields).__name__}, expected an object per line")
        yield _row({str(key).lower(): value for key, value in fields.items()}, file, number)


def _row(fields: dict[str, Any], file: Path, number: int) -> _Row:
    where = f"--trace: {file} line {number}"
    scale = 1e-3 if "hash_ids" in fields else 1.0  # Mooncake counts milliseconds
    stamp = _field(fields, "timestamp")
    if stamp is None:
        raise InputError(f"{where}: no timestamp; expected a column named one of {', '.join(_NAMES['timestamp'])}")
    output = _field(fields, "output")
    if output is None:
        raise InputError(f"{where}: no output tokens; expected a column named one of {', '.join(_NAMES['output'])}")
    adapter = _field(fields, "adapter")
    name = None if adapter is None else str(adapter).strip()
    if name == "":
        raise InputError(f"{where}: the adapter is empty; give its name, or leave the column out for all requests")
    tokens = (_tokens(_field(fields, "input") or 0, where, "input"), _tokens(output, where, "output"))
    return _seconds(stamp, where) * scale, name, *tokens


def _field(fields: dict[str, Any], kind: str) -> Any:
    return next((fields[name] for name in _NAMES[kind] if name in fields), None)


_MOST_TOKENS = 2**31


def _tokens(value: Any, where: str, kind: str) -> int:
    try:
        number = float(value)
        if not 0 <= number <= _MOST_TOKENS or number != int(number):
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        raise InputError(
            f"{where}: {kind} tokens: got {value!r}, expected a whole number in 0..{_MOST_TOKENS}"
        ) from None
    return max(int(number), 1 if kind == "output" else 0)


def _seconds(value: Any, where: str) -> float:
    """Parse seconds from a number, or from a date and time as Azure writes them (seven decimals, UTC)."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        try:
            head, _, fraction = str(value).strip().replace("Z", "+00:00").partition(".")
            digits = fraction[: len(fraction) - len(fraction.lstrip("0123456789"))]
            moment = datetime.fromisoformat(head + fraction[len(digits) :])
        except ValueError:
            raise InputError(f"{where}: timestamp: got {value!r}, expected seconds or an ISO 8601 date") from None
        aware = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
        number = aware.timestamp() + (float(f"0.{digits}") if digits else 0.0)
    if not np.isfinite(number):
        raise InputError(f"{where}: timestamp: got {value!r}, expected a finite number of seconds")
    return number
