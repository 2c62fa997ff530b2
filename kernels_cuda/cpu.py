"""One LoRA step on a CPU: torch GEMMs, one shrink and one expand per (segment, pair), no rank padding."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from kernels_cuda.ops import Step, placed

FEW_ROWS = range(4, 7)  # of a segment: see bench/results/kernels_cpu-2026-11.md
PART_ELEMENTS = 1 << 21  # of a result, that are computed at a time: a millisecond or a few


def lora_step(step: Step, out_UO: torch.Tensor) -> None:
    """Compute a step as `ops` defines it. Fills `out_UO` ([U, O], float dtype, contiguous; must not alias the rows).

    Two passes: shrink all segments, weight the rows of v, expand all; the scale goes with the expand.
    Without an out_map and in float32 the results go straight into `out_UO`, otherwise through one
    float32 buffer of N rows, and sums that are not float32 through another. Sums over the entries of an output row are
    in entry order.
    """
    for _ in lora_parts(step, out_UO):
        pass


def lora_parts(step: Step, out_UO: torch.Tensor) -> Iterator[None]:
    """Compute `lora_step` in parts, so that the caller can do other work between them; done when the iterator ends."""
    v_NR = torch.empty(step.num_entries, max((s.block.a_RK.shape[0] for s in step.segments), default=0))
    yield from _shrink(step, v_NR)
    if step.weights_N is not None:
        v_NR.mul_(step.weights_N[:, None])
    exact = out_UO.dtype == torch.float32
    direct = step.out_map_N is None and exact
    delta_NO = out_UO if direct else torch.empty(step.num_entries, step.out_width, dtype=torch.float32)
    yield from _expand(step, v_NR, delta_NO)
    if direct:
        return
    if step.out_map_N is None:
        yield from _copy(out_UO, delta_NO)
        return
    sum_UO = out_UO.zero_() if exact else torch.zeros(out_UO.shape, dtype=torch.float32)
    for some in _some_rows(delta_NO):
        sum_UO.index_add_(0, step.out_map_N[some], delta_NO[some])
        yield
    if not exact:
        yield from _copy(out_UO, sum_UO)


def _some_rows(x_NO: torch.Tensor) -> Iterator[slice]:
    """Cut the rows into slices of about PART_ELEMENTS elements each."""
    num = max(PART_ELEMENTS // max(x_NO.shape[1], 1), 1)
    return (slice(first, first + num) for first in range(0, x_NO.shape[0], num))


def _copy(out_UO: torch.Tensor, from_UO: torch.Tensor) -> Iterator[None]:
    for some in _some_rows(out_UO):
        out_UO[some] = from_UO[some]
        yield


def _shrink(step: Step, v_NR: torch.Tensor) -> Iterator[None]:
    """Compute v = x A for every entry: the ranks of a block's pairs side by side, the rest undefined."""
    rows_NK = step.rows_TK if step.in_map_N is None else step.rows_TK.index_select(0, step.in_map_N)
    rows_NK = rows_NK.float()
    for block, first, num_entries in step.segments:
        if block.pairs:
            x_nK = rows_NK[first : first + num_entries]
            a_RK = _window(block.a_RK, step.in_begin, x_nK.shape[1])
            torch.mm(x_nK, a_RK.t(), out=v_NR[first : first + num_entries, : a_RK.shape[0]])
            yield


def _window(a_RK: torch.Tensor, begin: int, width: int) -> torch.Tensor:
    """Return the columns of A that meet the rows' window, in float32."""
    return (a_RK if a_RK.shape[1] == width else a_RK[:, begin : begin + width]).float()


def _expand(step: Step, v_NR: torch.Tensor, delta_NO: torch.Tensor) -> Iterator[None]:
    """Compute delta = scale * v B for every entry, windows side by side; zero where no pair reaches."""
    for block, first, num_entries in step.segments:
        last, column, covered = first + num_entries, 0, 0
        parts = [placed(pair, step.windows) for pair in block.pairs]
        for part in parts:
            for b_oR, _ in part:
                covered += b_oR.shape[0]
        if covered < delta_NO.shape[1]:
            delta_NO[first:last].zero_()
        for pair, part in zip(block.pairs, parts, strict=True):
            v_nR = v_NR[first:last, column : column + pair.a_RK.shape[0]]
            for b_oR, begin in part:
                for b_pR, low in _some_of(b_oR, num_entries):
                    y_np = delta_NO[first:last, begin + low : begin + low + b_pR.shape[0]]
                    _times(v_nR, b_pR.float(), pair.scale, y_np)
                    yield
            column += pair.a_RK.shape[0]


def _some_of(b_oR: torch.Tensor, num_entries: int) -> Iterable[tuple[torch.Tensor, int]]:
    """Cut B so that a result of so many entries has PART_ELEMENTS elements; return (rows of B, the first's index)."""
    num = max(PART_ELEMENTS // max(num_entries, 1), 1)
    if b_oR.shape[0] <= num:  # nearly always: a view would cost what a small GEMM does
        return ((b_oR, 0),)
    return ((b_oR[low : low + num], low) for low in range(0, b_oR.shape[0], num))


def _times(v_nR: torch.Tensor, b_oR: torch.Tensor, scale: float, y_no: torch.Tensor) -> None:
    """Compute y = scale * v B. A GEMM of 4 rows or more repacks B; for FEW_ROWS, GEMMs of two rows each cost less."""
    num = v_nR.shape[0]
    if num not in FEW_ROWS:
        torch.addmm(y_no, v_nR, b_oR.t(), beta=0, alpha=scale, out=y_no)
        return
    for i in range(0, num, 2):
        out = y_no[i : i + 2]
        torch.addmm(out, v_nR[i : i + 2], b_oR.t(), beta=0, alpha=scale, out=out)
