"""Other numbers of warps and stages, and the other way to copy, at one cell: is `heuristics.choose` right?"""

from __future__ import annotations

from typing import Any

import torch

from bench.gpu_run.record import Record
from bench.kernels import measure as ours_measure
from bench.kernels import ours
from bench.kernels.models import MODELS, Model, Site
from kernels_cuda.cuda import CudaKernels
from kernels_cuda.heuristics import Variant

VARIANTS = (Variant(True, 8, 2), Variant(True, 9, 2), Variant(True, 6, 3), Variant(True, 4, 4), Variant(False, 8, 2))


def cell(model: str, site: str, tokens: int) -> tuple[Model, Site, int]:
    """Raises KeyError or ValueError for a cell that there is not."""
    (found,) = (one for one in MODELS[model].sites if one.name == site)
    return MODELS[model], found, tokens


def name(variant: Variant) -> str:
    """Return the variant's name in the report."""
    return f"{'bulk' if variant.bulk_copy else 'cp.async'} {variant.warps} warps x {variant.stages} stages"


def measure(record: Record, model_name: str, site_name: str, tokens: int) -> None:
    """One line per variant that the record lacks; one that does not fit this GPU says so."""
    model, site, tokens = cell(model_name, site_name, tokens)
    about: dict[str, Any] = {"model": model.name, "site": site.name, "tokens": tokens}
    left = [variant for variant in VARIANTS if not record.find("variant", **about, variant=name(variant))]
    if not left:
        return
    gpu = ours_measure.Gpu(torch.device("cuda", 0))
    adapters = ours.Adapters(model, site, torch.Generator(gpu.device).manual_seed(ours_measure.SEED))
    for variant in left:
        try:
            gpu.kernels = CudaKernels(gpu.device, variant)
            found = ours_measure.site_result(model, site, tokens, adapters, gpu)
            facts = {key: found[key] for key in ("us", "floor_ratio", "max_rel_err")}
        except Exception as problem:  # too much shared memory, say: that is what one wants to know
            facts = {"reason": f"{type(problem).__name__}: {problem}"[:200]}
        record.add("variant", **about, variant=name(variant), **facts)
    del adapters
    torch.cuda.empty_cache()
