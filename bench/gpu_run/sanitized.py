"""One small case for compute-sanitizer: `python -m bench.gpu_run.sanitized NAME`; exit status 0 if it is right.

Named apart from the stage so that the tool sees one process with few launches. Results are checked too: a tool that
finds nothing in a kernel that computes nonsense has shown little.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from bench.gpu_run import inproc
from bench.gpu_run.one_cell import MOST_ERROR
from bench.kernels import correctness, draws, ours
from bench.kernels.correctness import Case
from bench.kernels.models import Model
from kernels_cuda.cuda import kernels
from kernels_cuda.routing import router
from lora_server.device.protocol.gpu import Gpu
from lora_server.transport.environment import prepare_environment

TINY = Model("tiny", 512, 128, 4, 2, 16)
TINY_ADAPTERS, TINY_TOKENS = 8, 12
ROUTED_ERROR = 3e-3
STEPS = {
    "one row": Case(768, 96, 1, "one", False, torch.bfloat16, 1),
    "many segments": Case(2048, 33, 130, "distinct", False, torch.bfloat16, 2),
    "summed per token": Case(1000, 768, 130, "zipf", True, torch.bfloat16, 3),
    "narrow, float16": Case(33, 1000, 7, "zipf", True, torch.float16, 4),
}


def step(case: Case) -> bool:
    """The GPU's own variant alone: one launch against float64."""
    device = torch.device("cuda", 0)
    made = correctness.make(case, device)
    out, wanted = made.run(kernels(device).launch), correctness.expected(made)
    return correctness.near(correctness.errors(out, wanted))


def routed(combine: bool) -> bool:
    """The routing kernel, then a step over what it wrote."""
    device = torch.device("cuda", 0)
    (site,) = (site for site in TINY.sites if site.combine == combine)
    adapters = ours.Adapters(TINY, site, torch.Generator(device).manual_seed(1), num_adapters=TINY_ADAPTERS)
    drawn = draws.draw(TINY, TINY_TOKENS, 0)
    drawn = drawn._replace(adapters_T=drawn.adapters_T % TINY_ADAPTERS)
    count = TINY_TOKENS * TINY.top_k if combine else TINY_TOKENS
    rows = torch.randn(count, site.in_width, device=device).to(ours.DTYPE)
    draw = ours.device_draw(TINY, adapters, drawn, rows)
    ours.route(draw, router(device))
    ours.launch(draw, kernels(device), ours.workspace_for(TINY, site, TINY_TOKENS, device))
    return ours.sampled_error(draw, adapters, 4, 0) < ROUTED_ERROR


def served() -> bool:
    """A kernel that serves, put, wait and add; it leaves at the end. A tool that runs one kernel at a time stops none
    of them for good, since the one that serves leaves when it is idle."""
    prepare_environment()
    return answered(inproc.open_gpu(argparse.Namespace(gpu=""))[0])


def answered(gpu: Gpu) -> bool:
    """Whether one step of the small model, of both sites of a layer, is right."""
    given = argparse.Namespace(**inproc.EMULATED)
    with tempfile.TemporaryDirectory(prefix="lora-served-") as scratch:
        its = inproc.Setting(Path(scratch), gpu, given)
        try:
            with its.cell(its.tokens[0]) as cell:
                return cell.error(cell.drawns[0], cell.run, 0) < MOST_ERROR
        finally:
            its.shard.close()


CASES: dict[str, Callable[[], bool]] = {
    **{name: partial(step, case) for name, case in STEPS.items()},
    "routed, gate_up": partial(routed, False),
    "routed, down": partial(routed, True),
    "served": served,
}


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=CASES)
    right = CASES[parser.parse_args().name]()
    torch.cuda.synchronize()
    sys.exit(0 if right else "its result is wrong")


if __name__ == "__main__":
    main()
