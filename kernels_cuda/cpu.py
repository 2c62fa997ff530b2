"""One LoRA step on a CPU: torch GEMMs, one shrink and one expand per (segment, pair), no rank padding."""

from __future__ import annotations

import torch

from kernels_cuda.ops import Pair, Segment, Step, placed


def lora_step(step: Step, out_UO: torch.Tensor) -> None:
    """Semantics: see `ops`. Fills `out_UO` ([U, O], float dtype, contiguous; must not alias the rows).

    Without an out_map and in float32 the results go straight into `out_UO`; otherwise through one
    float32 buffer of N rows. Sums over the entries of an output row are in entry order.
    """
    rows_NK = step.rows_TK if step.in_map_N is None else step.rows_TK.index_select(0, step.in_map_N)
    rows_NK = rows_NK.float()
    direct = step.out_map_N is None and out_UO.dtype == torch.float32
    shape = (step.num_entries, step.out_width)
    delta_NO = out_UO if direct else torch.empty(shape, dtype=torch.float32)
    for segment in step.segments:
        _run_segment(step, segment, rows_NK, delta_NO)
    if direct:
        return
    if step.out_map_N is None:
        out_UO.copy_(delta_NO)
        return
    sum_UO = out_UO if out_UO.dtype == torch.float32 else torch.empty_like(out_UO, dtype=torch.float32)
    sum_UO.zero_().index_add_(0, step.out_map_N, delta_NO)
    if sum_UO is not out_UO:
        out_UO.copy_(sum_UO)


def _run_segment(step: Step, segment: Segment, rows_NK: torch.Tensor, delta_NO: torch.Tensor) -> None:
    first, last = segment.first, segment.first + segment.num_entries
    x_nK, y_nO = rows_NK[first:last], delta_NO[first:last]
    weights = None if step.weights_N is None else step.weights_N[first:last, None]
    if not _covers(segment, step):
        y_nO.zero_()
    for pair in segment.pairs:
        v_nR = _shrink(x_nK, pair, step.in_begin)
        if weights is not None:
            v_nR.mul_(weights)
        for b_oR, column in placed(pair, step.windows):
            torch.mm(v_nR, b_oR.float().t(), out=y_nO[:, column : column + b_oR.shape[0]])


def _shrink(x_nK: torch.Tensor, pair: Pair, in_begin: int) -> torch.Tensor:
    a_RK = pair.a_RK if pair.a_RK.shape[1] == x_nK.shape[1] else pair.a_RK[:, in_begin : in_begin + x_nK.shape[1]]
    v_nR = torch.mm(x_nK, a_RK.float().t())
    return v_nR.mul_(pair.scale)


def _covers(segment: Segment, step: Step) -> bool:
    """Whether the pairs fill every output row, so that nothing needs zeroing. Pairs never overlap."""
    return sum(b.shape[0] for pair in segment.pairs for b, _ in placed(pair, step.windows)) == step.out_width
