"""Bounds of the numbers in a LoRA step, against which its rounding errors are measured."""

from kernels_cuda import reference
from kernels_cuda.ops import Pair, Step, stack


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
