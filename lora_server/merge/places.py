"""Where an adapter's deltas go in a checkpoint: which bytes hold the matrix of which site, section and expert."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lora_server.adapters import Adapter
from lora_server.adapters.header import ITEM_BYTES, TensorEntry
from lora_server.adapters.keys import Form, Target, weight_target
from lora_server.errors import ConfigError
from lora_server.merge.checkpoint import Checkpoint
from lora_server.spec import ModelSpec, Section, Site


@dataclass(frozen=True)
class MatrixPlace:
    """One expert's (or a dense site's) matrix: bytes [begin, end) of a file, of `shape`.

    `sections` are the rows of the site that it holds. GPT-OSS stores [in, out] with gate and up alternating.
    """

    tensor: str
    file: str
    dtype: str
    begin: int
    end: int
    shape: tuple[int, int]
    site: Site
    expert: int
    sections: tuple[Section, ...]
    transposed: bool
    interleaved: bool


def find_places(checkpoint: Checkpoint, adapter: Adapter) -> list[MatrixPlace]:
    """Return the matrices that the adapter changes, by site, expert and section.

    Raises ConfigError where the checkpoint lacks one, or has it in another shape or dtype.
    """
    spec, sites = checkpoint.spec, frozenset(adapter.sites())
    places = [
        place
        for tensor in checkpoint.tensors
        if (target := weight_target(tensor.name, spec)) is not None and target.site in sites
        for place in _places(tensor, checkpoint.weight_files[tensor.file], target, spec)
        if _changed(adapter, place.site, place.expert, place.sections)
    ]
    found = {(place.site, place.expert, section.name) for place in places for section in place.sections}
    for site in adapter.sites():
        for expert in adapter.experts(site):
            for section in _changed(adapter, site, expert, spec.sections(site)):
                if (site, expert, section.name) not in found:
                    raise ConfigError(
                        f"{checkpoint.directory}: got no tensor for {section.name} of {site} expert {expert}, "
                        "which the adapter changes; expected the names of a Hugging Face checkpoint of "
                        f"{spec.model_type}"
                    )
    return sorted(places, key=lambda place: (place.site, place.expert, place.sections[0].begin))


def _changed(adapter: Adapter, site: Site, expert: int, sections: Sequence[Section]) -> list[Section]:
    parts = adapter.parts(site, expert)
    return [one for one in sections if any(part.out_begin < one.end and one.begin < part.out_end for part in parts)]


def _places(tensor: TensorEntry, file: str, target: Target, spec: ModelSpec) -> Iterator[MatrixPlace]:
    site, stacked = target.site, target.form is Form.STACKED
    sections = tuple(one for one in spec.sections(site) if target.section in (one.name, site.projection))
    transposed = stacked and spec.interleaved_gate_up
    rows, columns = sections[-1].end - sections[0].begin, spec.in_width(site)
    shape = (columns, rows) if transposed else (rows, columns)
    experts = range(spec.experts_at(site)) if stacked else (target.expert or 0,)
    expected = (len(experts), *shape) if stacked else shape
    if tensor.shape != expected or tensor.dtype not in ITEM_BYTES:
        raise ConfigError(
            f"{file}: {tensor.name}: got shape {list(tensor.shape)} of {tensor.dtype}, expected "
            f"{list(expected)} of {', '.join(ITEM_BYTES)}; is config.json of another model?"
        )
    nbytes = math.prod(shape) * ITEM_BYTES[tensor.dtype]
    for index, expert in enumerate(experts):
        begin = tensor.begin + index * nbytes
        yield MatrixPlace(
            tensor.name,
            file,
            tensor.dtype,
            begin,
            begin + nbytes,
            shape,
            site,
            expert,
            sections,
            transposed,
            transposed and len(sections) > 1,
        )
