"""The numbers of a LoRA step: bounds, against which its rounding errors are measured, and what 8 bits make of rows."""

import torch

from kernels_cuda import reference
from kernels_cuda.ops import Pair, Step, stack
from lora_server.transport import e4m3


def magnitudes(step):
    """Compute the step with every number replaced by its magnitude."""
    segments = [
        s._replace(block=stack([Pair(p.a_RK.abs(), p.b_OR.abs(), abs(p.scale), p.out_begin) for p in s.block.pairs]))
        for s in step.segments
    ]
    weights = None if step.weights_N is None else step.weights_N.abs()
    return reference.lora_step(replaced(step, rows_TK=step.rows_TK.abs(), segments=segments, weights_N=weights))


def replaced(step, **fields):
    return Step(**{**{name: getattr(step, name) for name in step.__dataclass_fields__}, **fields})


def quantised(x_TK):
    """Return the codes and scales that the host's rule makes of rows."""
    codes_TK, scales_T = torch.empty(x_TK.shape, dtype=torch.float8_e4m3fn), torch.empty(len(x_TK))
    e4m3.quantise(x_TK, codes_TK, scales_T)
    return codes_TK, scales_T
