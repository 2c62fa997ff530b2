"""Parse and bounds-check the header of a safetensors file, before anything else reads the file.

Layout: u64 little-endian N, then N bytes of JSON, then the data. The JSON maps each tensor's name to
{dtype, shape, data_offsets}, with offsets relative to the data. We ask for what the format promises:
the tensors cover the data exactly, without holes or overlaps, up to the last byte of the file.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lora_server.adapters.limits import check_values
from lora_server.adapters.refusal import refusal, shown

ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
_MOST = 1 << 48  # limit of a size, and of an offset
_DAMAGED = "the file is damaged or truncated: copy or save it again"


@dataclass(frozen=True)
class TensorEntry:
    """A tensor of a file; `begin` and `end` are offsets from the start of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int
    file: int = 0


def header_bytes(read: Callable[[int, int], bytes | bytearray], size: int, *, name: str) -> int:
    """Read the length of the header of a file of `size` bytes, and no more. Raises AdapterFormatError."""
    if size < 8:
        raise refusal(name, got=f"{size} bytes", expected="a safetensors file of at least 8 bytes", do=_DAMAGED)
    (length,) = struct.unpack("<Q", read(0, 8))
    if length > size - 8:
        raise refusal(name, got=f"a header length of {length} in {size} bytes", expected="it to fit", do=_DAMAGED)
    return int(length)


def read_header(
    read: Callable[[int, int], bytes | bytearray],
    size: int,
    most_bytes: int,
    *,
    name: str,
    file: int = 0,
    any_dtype: bool = False,
) -> list[TensorEntry]:
    """Return the tensors of a file of `size` bytes by offset; `read(begin, end)` reads it, errors call it `name`.

    `most_bytes`: of headers of this base model. `any_dtype`: also others than those of an adapter. Raises
    AdapterFormatError for every header that does not describe this file exactly.
    """
    length = header_bytes(read, size, name=name)
    raw = read(8, 8 + length)
    check_values(f"{name}: header", raw, most_bytes)
    fields = _parse(raw, name)
    fields.pop("__metadata__", None)
    data_begin = 8 + length
    entries = [_entry(key, value, data_begin, size, file, any_dtype) for key, value in fields.items()]
    if not entries and not any_dtype:
        raise refusal(name, got="no tensors", expected="the A and B matrices of an adapter", do="save it again")
    entries.sort(key=lambda entry: (entry.begin, entry.end))
    _check_cover(entries, data_begin, size, name)
    return entries


def _parse(raw: bytes | bytearray, name: str) -> dict[str, Any]:
    try:
        fields = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise refusal(name, got=f"a header that is not JSON ({error})", expected="JSON", do=_DAMAGED) from None
    if not isinstance(fields, dict):
        raise refusal(name, got=f"a header holding {shown(fields)}", expected="a JSON object", do=_DAMAGED)
    return fields


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise refusal(key, got="the key twice in one header", expected="once", do="save the adapter again")
            seen.add(key)
    return fields


def _entry(key: str, value: Any, data_begin: int, size: int, file: int, any_dtype: bool) -> TensorEntry:
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise refusal(key, got=shown(value), expected="dtype, shape and data_offsets in the header", do=_DAMAGED)
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or (dtype not in ITEM_BYTES and not any_dtype):
        wanted = f"dtype {', '.join(ITEM_BYTES)}"
        raise refusal(key, got=f"dtype {shown(dtype)}", expected=wanted, do="convert the adapter to one of these")
    if not _naturals(shape):
        raise refusal(key, got=f"shape {shown(shape)}", expected="a list of sizes", do=_DAMAGED)
    if not _naturals(offsets) or len(offsets) != 2 or not offsets[0] <= offsets[1] <= size - data_begin:
        wanted = f"two rising offsets within the {size - data_begin} bytes of data"
        raise refusal(key, got=f"data_offsets {shown(offsets)}", expected=wanted, do=_DAMAGED)
    num_bytes = math.prod(shape) * ITEM_BYTES.get(dtype, 0)
    if dtype in ITEM_BYTES and offsets[1] - offsets[0] != num_bytes:
        wanted = f"{num_bytes} for shape {shown(shape)} of {dtype}"
        raise refusal(key, got=f"{offsets[1] - offsets[0]} bytes of data", expected=wanted, do=_DAMAGED)
    return TensorEntry(key, dtype, tuple(shape), data_begin + offsets[0], data_begin + offsets[1], file)


def _naturals(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < _MOST for item in value)


def _check_cover(entries: list[TensorEntry], data_begin: int, size: int, name: str) -> None:
    at = data_begin
    for entry in entries:
        if entry.begin != at:
            kind = "overlapping" if entry.begin < at else "not adjacent to"
            got = f"data at {entry.begin - data_begin}, {kind} the tensor before it"
            raise refusal(entry.name, got=got, expected=f"data at {at - data_begin}", do=_DAMAGED)
        at = entry.end
    if at != size:
        raise refusal(name, got=f"{size - at} bytes after the last tensor", expected="none", do=_DAMAGED)
