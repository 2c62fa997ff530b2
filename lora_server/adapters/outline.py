"""Outline of an adapter, a compact form of its headers and config: where in its files each matrix is.

It takes 24 bytes per part of an expert of a site. Adapters with the same outline can share one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from lora_server.adapters.header import ITEM_BYTES, TensorEntry
from lora_server.adapters.keys import Form
from lora_server.adapters.parts import DeltaPart, StoredPart
from lora_server.spec import PROJECTIONS, ModelSpec, Site

_ROW = np.dtype([("expert", "<i4"), ("kind", "<i4"), ("a", "<i8"), ("b", "<i8")])
_KIND_BYTES = 400


class Matrix(NamedTuple):
    """File of a matrix, and its dtype in safetensors."""

    file: int
    dtype: str


class Kind(NamedTuple):
    """Properties that many pairs share. `fused`: B is in one tensor with those of all experts (keys.Form.FLAT);
    `interleaved`: rows of B are gate, up, gate, up."""

    part: DeltaPart
    a: Matrix
    b: Matrix
    fused: bool
    interleaved: bool


class PairOutline(NamedTuple):
    """Offsets in their files at which A and B of one expert's part begin; a fused B begins with expert 0."""

    kind: Kind
    a_begin: int
    b_begin: int


class Outline:
    """The places of all matrices of an adapter. Equal outlines have equal `key`s. `names` are those of the files."""

    def __init__(
        self, names: Sequence[str], parts: Mapping[Site, Mapping[int, Sequence[StoredPart]]], spec: ModelSpec
    ) -> None:
        """`parts`: the result of `collect`, in its order."""
        self.names = tuple(names)
        kinds: dict[Kind, int] = {}
        rows: list[tuple[int, int, int, int]] = []
        codes, ends = [], []
        for site, experts in parts.items():
            for expert, stored_parts in experts.items():
                for stored in stored_parts:
                    kind, a, b = _pair(stored, expert, spec)
                    rows.append((expert, kinds.setdefault(kind, len(kinds)), a, b))
            codes.append(_code(site))
            ends.append(len(rows))
        self._kinds = tuple(kinds)
        self._rows = np.array(rows, _ROW)
        self._codes, self._ends = np.array(codes, np.int32), np.array(ends, np.int32)

    @cached_property
    def key(self) -> bytes:
        """Digest of the outline."""
        arrays = (self._rows.tobytes(), self._codes.tobytes(), self._ends.tobytes())
        return hashlib.sha256(b"".join((repr((self.names, self._kinds)).encode(), *arrays))).digest()

    @property
    def nbytes(self) -> int:
        """Memory that the outline takes, about."""
        return self._rows.nbytes + self._codes.nbytes + self._ends.nbytes + _KIND_BYTES * len(self._kinds)

    def sites(self) -> tuple[Site, ...]:
        """Return the sites with a delta, by layer and then in the order of PROJECTIONS."""
        split = (divmod(code, len(PROJECTIONS)) for code in self._codes.tolist())
        return tuple(Site(layer, PROJECTIONS[projection]) for layer, projection in split)

    def at(self, site: Site) -> dict[int, list[PairOutline]]:
        """Return the pairs of a site by expert, sorted, each expert's by out_begin."""
        index = int(self._codes.searchsorted(_code(site)))
        if index == len(self._codes) or self._codes[index] != _code(site):
            return {}
        found: dict[int, list[PairOutline]] = {}
        begin = self._ends[index - 1] if index else 0
        for expert, kind, a, b in self._rows[begin : self._ends[index]].tolist():
            found.setdefault(expert, []).append(PairOutline(self._kinds[kind], a, b))
        return found


def _code(site: Site) -> int:
    return site.layer * len(PROJECTIONS) + PROJECTIONS.index(site.projection)


def _pair(stored: StoredPart, expert: int, spec: ModelSpec) -> PairOutline:
    part, target = stored.part, stored.target
    fused = target.form is Form.FLAT
    kind = Kind(
        part,
        Matrix(stored.a.file, stored.a.dtype),
        Matrix(stored.b.file, stored.b.dtype),
        fused,
        spec.interleaved_gate_up and target.section == "gate_up",
    )
    a_begin = _begin(stored.a, expert, part.lora_rank * spec.in_width(target.site))
    b_begin = stored.b.begin if fused else _begin(stored.b, expert, part.lora_rank * (part.out_end - part.out_begin))
    return PairOutline(kind, a_begin, b_begin)


def _begin(entry: TensorEntry, expert: int, size: int) -> int:
    """Return the offset of the expert's matrix in a tensor of one matrix per expert; otherwise the tensor's offset."""
    nbytes = size * ITEM_BYTES[entry.dtype]
    return entry.begin + expert * nbytes if entry.end - entry.begin > nbytes else entry.begin
