"""Collect named tensors into the parts of sites: one A and one B each, with checked shapes, ranks and places."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from lora_server.adapters.header import ITEM_BYTES, TensorEntry
from lora_server.adapters.keys import Form, Target, nested_layers, parse_key
from lora_server.adapters.refusal import refusal
from lora_server.adapters.settings import LoraSettings
from lora_server.spec import PROJECTIONS, ModelSpec, Site


@dataclass(frozen=True)
class DeltaPart:
    """One (A, B) of one expert of one site: delta rows [out_begin, out_end) = scale * B A x."""

    lora_rank: int
    scale: float
    out_begin: int
    out_end: int


@dataclass(frozen=True)
class StoredPart:
    """Two tensors on disk that hold a DeltaPart, of one expert or (expert None) of all."""

    target: Target
    part: DeltaPart
    a: TensorEntry
    b: TensorEntry

    def num_bytes(self, in_width: int) -> int:
        """Return the bytes of one expert's canonical A and B."""
        rows = self.part.out_end - self.part.out_begin
        return self.part.lora_rank * (in_width * ITEM_BYTES[self.a.dtype] + rows * ITEM_BYTES[self.b.dtype])


def collect(
    entries: Mapping[str, TensorEntry], spec: ModelSpec, settings: LoraSettings
) -> dict[Site, dict[int, tuple[StoredPart, ...]]]:
    """Return the parts of each site and expert, by out_begin; sites in order.

    Every entry belongs to exactly one; raises AdapterFormatError for one that cannot.
    """
    found: dict[Site, dict[int, list[StoredPart]]] = {}
    for target, sides in _couples(entries, spec, settings).items():
        stored = _stored_part(target, sides["A"], sides["B"], spec, settings)
        experts = range(spec.experts_at(target.site)) if target.expert is None else (target.expert,)
        for expert in experts:
            found.setdefault(target.site, {}).setdefault(expert, []).append(stored)
    order = sorted(found, key=lambda site: (site.layer, PROJECTIONS.index(site.projection)))
    return {site: {expert: _disjoint(found[site][expert]) for expert in sorted(found[site])} for site in order}


def _couples(
    entries: Mapping[str, TensorEntry], spec: ModelSpec, settings: LoraSettings
) -> dict[Target, dict[str, TensorEntry]]:
    nested = nested_layers(entries)
    couples: dict[Target, dict[str, TensorEntry]] = {}
    for key, entry in entries.items():
        target, side = parse_key(key, nested, spec, settings)
        if target.form is Form.MATRIX:
            settings.selection.check(key, target.module, target.site.layer)
        sides = couples.setdefault(target, {})
        if side in sides:
            raise refusal(key, got=f"a second tensor for {sides[side].name}", expected="one", do="remove one of them")
        sides[side] = entry
    for sides in couples.values():
        for side, other in (("A", "B"), ("B", "A")):
            if other not in sides:
                got = f"half a pair: lora_{side} without lora_{other}"
                raise refusal(sides[side].name, got=got, expected="both", do="save the adapter again")
    return couples


def _stored_part(target: Target, a: TensorEntry, b: TensorEntry, spec: ModelSpec, settings: LoraSettings) -> StoredPart:
    sections = spec.sections(target.site)
    begin, end = sections[0].begin, sections[-1].end
    for section in sections:
        if section.name == target.section:
            begin, end = section.begin, section.end
    lora_rank = settings.rank_of(target.module)
    _check_shape(a, _a_shapes(target, lora_rank, spec), lora_rank, target, spec)
    _check_shape(b, _b_shapes(target, lora_rank, end - begin, spec), lora_rank, target, spec)
    return StoredPart(target, DeltaPart(lora_rank, settings.scale_of(target.module), begin, end), a, b)


def _a_shapes(target: Target, lora_rank: int, spec: ModelSpec) -> list[tuple[int, ...]]:
    width, experts = spec.in_width(target.site), spec.experts_at(target.site)
    if target.form is Form.STACKED:
        return [(experts, lora_rank, width), (1, lora_rank, width)]
    return [(experts * lora_rank if target.form is Form.FLAT else lora_rank, width)]


def _b_shapes(target: Target, lora_rank: int, rows: int, spec: ModelSpec) -> list[tuple[int, ...]]:
    experts = spec.experts_at(target.site)
    if target.form is Form.STACKED:
        return [(experts, rows, lora_rank), (1, rows, lora_rank)]
    return [(rows, experts * lora_rank if target.form is Form.FLAT else lora_rank)]


def _check_shape(
    entry: TensorEntry, allowed: list[tuple[int, ...]], lora_rank: int, target: Target, spec: ModelSpec
) -> None:
    if entry.shape in allowed:
        return
    wanted = " or ".join(str(list(shape)) for shape in allowed)
    experts = f", {spec.experts_at(target.site)} experts" if target.expert is None else ""
    raise refusal(
        entry.name,
        got=f"shape {list(entry.shape)}",
        expected=f"{wanted} (lora_rank {lora_rank} by adapter_config.json{experts}, base model {spec.name})",
        do="the adapter is of another base model, or r or rank_pattern is wrong",
    )


def _disjoint(parts: list[StoredPart]) -> tuple[StoredPart, ...]:
    parts = sorted(parts, key=lambda stored: stored.part.out_begin)
    for left, right in pairwise(parts):
        if right.part.out_begin < left.part.out_end:
            got = f"a second delta for what {left.a.name} adapts"
            raise refusal(right.a.name, got=got, expected="one", do="remove one of them")
    return tuple(parts)
