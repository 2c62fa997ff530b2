"""The slow, obvious oracle: the loops of the contract in float64 numpy."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from kernels_cuda.ops import Step


def _array(tensor: torch.Tensor) -> npt.NDArray[np.float64]:
    return np.asarray(tensor.detach().to(torch.float64).cpu().numpy())


def lora_step(step: Step) -> npt.NDArray[np.float64]:
    """Compute a step as `ops` defines it. Returns [U, O] float64."""
    rows = _array(step.rows_TK)
    site_width = max(
        [end for _, end in step.windows]
        + [pair.out_begin + pair.b_OR.shape[0] for segment in step.segments for pair in segment.block.pairs]
    )
    out = np.zeros((step.num_out_rows, site_width))
    for segment in step.segments:
        for i in range(segment.first, segment.first + segment.num_entries):
            x = rows[i if step.in_map_N is None else int(step.in_map_N[i])]
            target = i if step.out_map_N is None else int(step.out_map_N[i])
            weight = 1.0 if step.weights_N is None else float(step.weights_N[i])
            for pair in segment.block.pairs:
                a, b = _array(pair.a_RK)[:, step.in_begin : step.in_begin + x.shape[0]], _array(pair.b_OR)
                v = a @ x * (pair.scale * weight)
                out[target, pair.out_begin : pair.out_begin + b.shape[0]] += b @ v
    return np.concatenate([out[:, begin:end] for begin, end in step.windows], axis=1)
