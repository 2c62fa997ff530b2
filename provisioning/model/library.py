"""Adapters as they are: what `--from-adapters` reads of a directory of PEFT adapters, or of a server's list.

A plan has slots of one size, so mixed adapters become one: the rank, a fraction as a rule, at which an adapter on all
experts has their mean bytes. Those of attention count among them. Legend: N adapters.
"""

from __future__ import annotations

import json
import math
import re
import struct
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lora_server.spec import ModelSpec
from provisioning.arrays import Floats, Ints
from provisioning.inputs import InputError, parsed, text_of
from provisioning.workload.workload import Workload

_ATTENTION = re.compile(r"\.(q_proj|k_proj|v_proj|o_proj|qkv_proj|Wqkv|out_proj)\.lora_")
_ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}  # older servers' lists do not say which
_MOST_HEADER_BYTES = 100_000_000
_LIST_SECONDS = 60.0


@dataclass(frozen=True, eq=False, kw_only=True)
class Library:
    """Adapters as read: `bytes_N` with 2-byte elements; `attention_N`: those with sites in attention."""

    source: str
    names: tuple[str, ...]
    bytes_N: Floats
    ranks_N: Ints
    attention_N: NDArray[np.bool_]

    def sized(self, workload: Workload, spec: ModelSpec, *, shared_a: bool) -> tuple[Workload, float, float]:
        """Return (workload with sizes and names, one rank for all, share of tokens with attention) for a model.

        At that rank, an adapter on all experts has a slot's bytes.

        Which adapter is how popular is not known where the calls name none: sizes are then means.
        """
        own = self.ordered_as(workload)
        mean, attention = float(own.bytes_N.mean()), float(own.attention_N.mean())
        if workload.names:  # a slot has the larger mean, over adapters or over requests in flight
            mean = max(mean, float(own.bytes_N @ workload.in_flight))
            attention = float(own.attention_N @ workload.in_flight)
        ranks = f"{own.ranks} ({own.source})"
        rank = mean / spec.adapter_bytes(1, shared_a=shared_a)
        return replace(workload, ranks=ranks, names=own.names), rank, attention

    def ordered_as(self, workload: Workload) -> Library:
        """Order by a workload's adapter names; unchanged where it names none."""
        if not workload.names:
            asked, held = workload.num_adapters, len(self.names)
            if asked != held:
                raise InputError(f"--adapters: got {asked:,}, but {self.source} has {held:,}; give as many")
            return self
        place = {name: index for index, name in enumerate(self.names)}
        missing = [name for name in workload.names if name not in place]
        if missing:
            raise InputError(f"--from-adapters: {self.source} has no adapter {missing[0]!r}, which is called")
        order = np.array([place[name] for name in workload.names])
        bytes_N, ranks_N, attention_N = self.bytes_N[order], self.ranks_N[order], self.attention_N[order]
        return replace(self, names=workload.names, bytes_N=bytes_N, ranks_N=ranks_N, attention_N=attention_N)

    @property
    def ranks(self) -> str:
        """rank 8, or ranks 8 to 64."""
        low, high = int(self.ranks_N.min()), int(self.ranks_N.max())
        return f"rank {low:,}" if low == high else f"ranks {low:,} to {high:,}"


def read(source: str) -> Library:
    """Read a directory of adapters, a HOST:PORT, or a file of `lora-server adapters list --json`; raises InputError."""
    path = Path(source)
    if path.is_dir():
        return _of_directory(path)
    where = f"--from-adapters: {source}"
    if path.is_file():
        return _of_list(parsed(text_of(path, where, "utf-8-sig"), where), source)
    if re.fullmatch(r"\S+:\d+", source):
        return _of_list(parsed(_asked(source, where), where), source)
    raise InputError(f"{where} is no directory, no file and no HOST:PORT; give one of these")


def _asked(server: str, where: str) -> str:
    command = [sys.executable, "-m", "lora_server", "adapters", "list", "--json", "--server", server]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIST_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise InputError(f"{where}: no answer within {_LIST_SECONDS:g} s; is it a running lora-server?") from None
    if done.returncode:
        raise InputError(f"{where}: {' '.join(done.stderr.split()) or 'no answer'}")
    return done.stdout


def _of_list(rows: Any, source: str) -> Library:
    try:
        rows = [row for row in rows if row.get("state") != "refused"]
        names = tuple(str(row["name"]) for row in rows)
        bytes_N = np.array([float(row["bytes"]) * 2 / _ITEM_BYTES[row.get("dtype") or "bfloat16"] for row in rows])
        ranks_N = np.array([int(row["lora_rank"]) for row in rows], dtype=np.int64)
    except (AttributeError, TypeError, KeyError, ValueError):
        raise InputError(
            f"--from-adapters: {source}: expected what `lora-server adapters list --json` prints"
        ) from None
    return _library(source, names, bytes_N, ranks_N, np.zeros(len(names), dtype=bool))


def _of_directory(directory: Path) -> Library:
    children = (child for child in sorted(directory.iterdir()) if not child.name.startswith("."))
    found = {child.name: child for child in children if any(child.glob("adapter_model*.safetensors"))}
    rows = [_adapter(child) for child in found.values()]
    return _library(
        str(directory),
        tuple(found),
        np.array([elements * 2.0 for elements, _, _ in rows]),
        np.array([rank for _, rank, _ in rows], dtype=np.int64),
        np.array([attention for _, _, attention in rows], dtype=bool),
    )


def _library(source: str, names: tuple[str, ...], bytes_N: Floats, ranks_N: Ints, attention_N: Any) -> Library:
    if not names:
        raise InputError(f"--from-adapters: {source} holds no adapters; expected sub-directories saved by PEFT")
    if not (bytes_N > 0).all():
        raise InputError(f"--from-adapters: {source}: adapter {names[int(np.argmin(bytes_N))]!r} has no weights")
    return Library(source=source, names=names, bytes_N=bytes_N, ranks_N=ranks_N, attention_N=attention_N)


def _adapter(directory: Path) -> tuple[int, int, bool]:
    """Read (elements, rank, whether attention has any) from the config and the headers alone."""
    try:
        config = json.loads((directory / "adapter_config.json").read_text(encoding="utf-8"))
        rank = max([int(config["r"]), *map(int, (config.get("rank_pattern") or {}).values())])
        shapes = {}
        for file in directory.glob("adapter_model*.safetensors"):
            shapes.update(_shapes(file))
        elements = sum(math.prod(shape) for shape in shapes.values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, struct.error) as error:
        raise InputError(f"--from-adapters: {directory} cannot be read as a PEFT adapter: {error!r}") from None
    return elements, rank, any(_ATTENTION.search(name) for name in shapes)


def _shapes(file: Path) -> dict[str, list[int]]:
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        if length > _MOST_HEADER_BYTES:
            raise ValueError(f"{file.name}: a header of {length} bytes")
        header = json.loads(stream.read(length))
    return {name: fields["shape"] for name, fields in header.items() if name != "__metadata__"}
