"""`lora-server serve` with shards that compute each entry alone: python -m tests.support.rows_apart_serve serve FLAG...

A GEMM rounds differently for different numbers of rows; on these shards no bit of a row depends on the rows beside it.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch

from kernels_cuda import cpu
from kernels_cuda.ops import Segment, Step
from lora_server.cli import main as serve
from lora_server.daemon import node, shard_main

TOGETHER = cpu.lora_parts


def parts(step: Step, out_UO: torch.Tensor) -> Iterator[None]:
    """Do the work of `cpu.lora_parts` one row at a time, in memory of its own."""
    delta_NO = torch.empty(step.num_entries, step.out_width)
    for block, first, count in step.segments:
        for entry in range(first, first + count):
            row = entry if step.in_map_N is None else int(step.in_map_N[entry])
            weights = None if step.weights_N is None else step.weights_N[entry : entry + 1].clone()
            alone = replace(
                step,
                rows_TK=step.rows_TK[row : row + 1].clone(),
                segments=[Segment(block, 0, 1)],
                num_entries=1,
                num_out_rows=1,
                in_map_N=None,
                out_map_N=None,
                weights_N=weights,
            )
            out_1O = torch.empty(1, step.out_width)
            yield from TOGETHER(alone, out_1O)
            delta_NO[entry] = out_1O[0]
    to_N = torch.arange(step.num_entries) if step.out_map_N is None else step.out_map_N
    out_UO.copy_(torch.zeros(out_UO.shape).index_add_(0, to_N, delta_NO))


def main() -> None:
    """Run a shard with these parts."""
    cpu.lora_parts = parts
    shard_main.main()


if __name__ == "__main__":
    node.SHARD = "tests.support.rows_apart_serve"
    serve()
