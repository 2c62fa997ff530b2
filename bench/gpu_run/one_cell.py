"""A few launches of one cell, for a profiler: `python -m bench.gpu_run.one_cell MODEL SITE TOKENS`."""

from __future__ import annotations

import argparse

import torch

from bench.kernels import draws, measure, ours
from bench.kernels.models import MODELS
from kernels_cuda.cuda import kernels
from kernels_cuda.routing import router

WARM_UP, LAUNCHES = 2, 4
MOST_ERROR = 5e-3  # of a sampled row's norm, bf16


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("site", choices=("gate_up", "down"))
    parser.add_argument("tokens", type=int)
    return parser.parse_args(arguments)


def main() -> None:
    """Entry point."""
    given = parse()
    device, model = torch.device("cuda", 0), MODELS[given.model]
    (site,) = (site for site in model.sites if site.name == given.site)
    generator = torch.Generator(device).manual_seed(measure.SEED)
    adapters = ours.Adapters(model, site, generator)
    rows = measure.rows_of(model, site, given.tokens, generator)
    draw = ours.device_draw(model, adapters, draws.draw(model, given.tokens, 0), rows)
    workspace = ours.workspace_for(model, site, given.tokens, device)
    ours.route(draw, router(device))
    for _ in range(LAUNCHES):
        ours.launch(draw, kernels(device), workspace)
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
