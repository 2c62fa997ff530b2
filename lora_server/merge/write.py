"""Writes a merged checkpoint: the weight files one after another, then the record; then it renames the directory.

Until then the directory has a temporary name, and a state file that lists the complete weight files: a merge that was
interrupted continues after them. Memory holds one matrix of the base model and one pair of the adapter at a time.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from lora_server.adapters import Adapter
from lora_server.errors import ConfigError
from lora_server.merge.checkpoint import Checkpoint
from lora_server.merge.places import MatrixPlace, find_places
from lora_server.merge.rounding import RowErrors, merged_matrix
from lora_server.merged import MERGED, MergedRecord

CHUNK_BYTES = 16 << 20
STATE = ".merge_state.json"
Report = Callable[[int], None]  # bytes written since the last call


class Merge:
    """One merge of `adapter` (its digest is `version`) into a base model; `out` does not exist until it is done."""

    def __init__(self, base: Path, adapter: Adapter, version: str, name: str, out: Path) -> None:
        """Check everything that can be checked without reading weights. Raises ConfigError."""
        self._checkpoint = Checkpoint(base)
        self._adapter, self._version, self._name, self._out = adapter, version, name, out.absolute()
        if self._out.exists():
            raise ConfigError(f"--out {out}: got a path that exists, expected a new one; remove it or name another")
        if adapter.invocation is not None:
            raise ConfigError(
                f"adapter {name!r}: got an activated LoRA, expected one that acts on every row: weights cannot wait "
                "for an invocation in the prompt"
            )
        self._places: dict[str, list[MatrixPlace]] = defaultdict(list)
        for place in find_places(self._checkpoint, adapter):
            self._places[place.file].append(place)
        self._partial = self._out.with_name(f".{self._out.name}.partial")
        self._sizes = {name: (base / name).stat().st_size for name in self._checkpoint.weight_files}
        self.total_bytes = sum(self._sizes.values())

    def run(self, report: Report = lambda nbytes: None) -> MergedRecord:
        """Write what is missing, and return the record. Raises ConfigError, AdapterFormatError, OSError."""
        state = self._begin()
        errors = RowErrors(state["sums"])
        for name in self._checkpoint.weight_files:
            if name in state["done"]:
                report(self._sizes[name])
                continue
            self._write_file(name, errors, report)
            state["done"].append(name)
            _write_json(self._partial / STATE, state)
        for path in self._checkpoint.other_files():
            shutil.copyfile(path, self._partial / path.name)
        self._adapter.check()
        record = self._record(errors)
        (self._partial / MERGED).write_text(record.to_json())
        (self._partial / STATE).unlink()
        self._partial.rename(self._out)
        return record

    def _begin(self) -> dict[str, Any]:
        """Return the state to continue from: that of an interrupted merge of the same inputs, else a new one.

        Files of a merge of other inputs are removed.
        """
        base, state = self._checkpoint.directory, self._partial / STATE
        times = [(base / name).stat().st_mtime_ns for name in self._sizes]
        inputs = [str(base.resolve()), self._version, self._name, self._sizes, times]
        if state.is_file():
            found: dict[str, Any] = json.loads(state.read_text())
            if found["inputs"] == inputs:
                return found
        shutil.rmtree(self._partial, ignore_errors=True)
        self._partial.mkdir(parents=True)
        return {"inputs": inputs, "done": [], "sums": {}}

    def _write_file(self, name: str, errors: RowErrors, report: Report) -> None:
        source, places = self._checkpoint.directory / name, self._places[name]
        with source.open("rb", buffering=0) as base, (self._partial / name).open("wb", buffering=0) as out:
            for begin, end in _gaps(places, self._sizes[name]):
                for at in range(begin, end, CHUNK_BYTES):
                    piece = _read(base.fileno(), at, min(end, at + CHUNK_BYTES), source)
                    _write(out.fileno(), at, memoryview(piece))
                    report(len(piece))
            for place in places:
                data = _read(base.fileno(), place.begin, place.end, source)
                matrix = merged_matrix(place, data, self._adapter, errors).contiguous()
                _write(out.fileno(), place.begin, matrix.view(torch.uint8).numpy().data.cast("B"))
                report(place.end - place.begin)
            os.fsync(out.fileno())

    def _record(self, errors: RowErrors) -> MergedRecord:
        spec = self._checkpoint.spec
        dtypes = {place.dtype for places in self._places.values() for place in places}
        return MergedRecord(
            name=self._name,
            version=self._version,
            base_model=spec.name,
            base_fingerprint=spec.fingerprint(),
            base_weights=self._checkpoint.fingerprint(),
            dtype=", ".join(sorted(dtypes)),
            files=self._sizes,
            errors=errors.result(),
            delta_ratio=errors.delta_ratio(),
        )


def _gaps(places: Sequence[MatrixPlace], size: int) -> Iterator[tuple[int, int]]:
    """Yield the runs of a file's bytes that no place covers: the header, and tensors that stay as they are."""
    at = 0
    for begin, end in sorted((place.begin, place.end) for place in places):
        if at < begin:
            yield at, begin
        at = end
    if at < size:
        yield at, size


def _read(descriptor: int, begin: int, end: int, path: Path) -> bytearray:
    buffer, at = bytearray(end - begin), begin
    view = memoryview(buffer)
    while view:
        got = os.preadv(descriptor, [view], at)
        if got == 0:
            raise ConfigError(
                f"{path}: got the end of the file at {at}, expected {end} bytes; it was changed meanwhile"
            )
        view, at = view[got:], at + got
    return buffer


def _write(descriptor: int, begin: int, data: memoryview) -> None:
    while data:
        written = os.pwrite(descriptor, data, begin)
        data, begin = data[written:], begin + written


def _write_json(path: Path, content: object) -> None:
    """Replace a file at once, so that a reader never sees a part of it."""
    pending = path.with_suffix(".tmp")
    pending.write_text(json.dumps(content))
    pending.rename(path)
