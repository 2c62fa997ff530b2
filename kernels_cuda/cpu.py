"""One LoRA step on a CPU: one shrink and one expand per (segment, pair), no rank padding.

Products of few rows and a small matrix are NumPy's, row by row: its views and calls cost less than torch's, and nothing
is repacked. All others are torch's GEMMs, which may use several threads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from kernels_cuda.ops import Block, Step, Windows

FEW_ROWS, SMALL_ELEMENTS = 4, 1 << 19  # at most: see bench/results/kernels_cpu-2026-11.md
PART_ELEMENTS = 1 << 21  # of a result, that are computed at a time: a millisecond or a few
Floats: TypeAlias = npt.NDArray[np.float32]
Matrix: TypeAlias = Floats | torch.Tensor  # torch's where weights are not float32: NumPy lacks bfloat16


def lora_step(step: Step, out_UO: torch.Tensor) -> None:
    """Compute a step as `ops` defines it. Fills `out_UO` ([U, O], float dtype, contiguous; must not alias the rows).

    Two passes: shrink all segments, scale and weight the rows of v, expand all.
    Without an out_map and in float32 the results go straight into `out_UO`, otherwise through one
    float32 buffer of N rows, and sums that are not float32 through another. Sums over the entries of an output row are
    in entry order.
    """
    for _ in lora_parts(step, out_UO):
        pass


def lora_parts(step: Step, out_UO: torch.Tensor) -> Iterator[None]:
    """Compute `lora_step` in parts, so that the caller can do other work between them; done when the iterator ends."""
    segments = [(_views(block, step.windows), first, first + count) for block, first, count in step.segments]
    v_NR = np.zeros((step.num_entries, max([views.rank for views, _, _ in segments], default=0)), np.float32)
    yield from _shrink(step, segments, v_NR)
    _scale(step, segments, v_NR)
    exact = out_UO.dtype == torch.float32
    direct = step.out_map_N is None and exact
    delta_NO = out_UO if direct else torch.empty(step.num_entries, step.out_width, dtype=torch.float32)
    yield from _expand(segments, v_NR, delta_NO.numpy())
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


class _PairWindow(NamedTuple):
    """The rows of a pair's B in one window: the columns of v that they meet, and the columns of the result."""

    b_OR: Matrix
    ranks: slice
    columns: slice


class _BlockViews(NamedTuple):
    """A block for steps with these windows. `rank` is that of all pairs together; `scales_R` has a scale per column of
    v, None where all are `scale`; `width` is the number of columns of the result that `parts` fill."""

    windows: Windows
    rank: int
    a_RK: Matrix
    scale: float
    scales_R: Floats | None
    parts: tuple[_PairWindow, ...]
    width: int


_Segments: TypeAlias = Sequence[tuple[_BlockViews, int, int]]  # first entry, and that after the last


def _views(block: Block, windows: Windows) -> _BlockViews:
    """Return a block's views. It keeps them, since the steps at a site nearly always have the same windows."""
    views: _BlockViews | None = block.views
    if views is None or views.windows != windows:
        ranks = [pair.a_RK.shape[0] for pair in block.pairs]
        scales = [pair.scale for pair in block.pairs]
        is_even = len(set(scales)) < 2
        scales_R = None if is_even else np.repeat(np.array(scales, np.float32), ranks)
        parts = tuple(_pair_windows(block, windows))
        width = sum(part.columns.stop - part.columns.start for part in parts)
        scale = scales[0] if scales and is_even else 1.0
        views = block.views = _BlockViews(windows, sum(ranks), _matrix(block.a_RK), scale, scales_R, parts, width)
    return views


def _pair_windows(block: Block, windows: Windows) -> Iterator[_PairWindow]:
    """Cut the B of each pair by the windows, which lie side by side in the result."""
    rank = 0
    for pair in block.pairs:
        ranks = slice(rank, rank + pair.a_RK.shape[0])
        column, first, last = 0, pair.out_begin, pair.out_begin + pair.b_OR.shape[0]
        for begin, end in windows:
            low, high = max(begin, first), min(end, last)
            if low < high:
                columns = slice(column + low - begin, column + high - begin)
                yield _PairWindow(_matrix(pair.b_OR[low - first : high - first]), ranks, columns)
            column += end - begin
        rank = ranks.stop


def _matrix(w_OK: torch.Tensor) -> Matrix:
    """Return float32 weights as NumPy's, which share their memory; others as they are."""
    return w_OK.numpy() if w_OK.dtype == torch.float32 else w_OK


def _some_rows(x_NO: torch.Tensor) -> Iterator[slice]:
    """Cut the rows into slices of about PART_ELEMENTS elements each."""
    num = max(PART_ELEMENTS // max(x_NO.shape[1], 1), 1)
    return (slice(first, first + num) for first in range(0, x_NO.shape[0], num))


def _copy(out_UO: torch.Tensor, from_UO: torch.Tensor) -> Iterator[None]:
    for some in _some_rows(out_UO):
        out_UO[some] = from_UO[some]
        yield


def _shrink(step: Step, segments: _Segments, v_NR: Floats) -> Iterator[None]:
    """Compute v = x A for every entry: the ranks of a block's pairs side by side."""
    rows_NK = step.rows_TK if step.in_map_N is None else step.rows_TK.index_select(0, step.in_map_N)
    x_NK = rows_NK.float().numpy()
    begin, width = step.in_begin, x_NK.shape[1]
    for views, first, last in segments:
        if views.rank:
            a_RK = views.a_RK if views.a_RK.shape[1] == width else views.a_RK[:, begin : begin + width]
            _times(x_NK[first:last], a_RK, v_NR[first:last, : views.rank])
            yield


def _scale(step: Step, segments: _Segments, v_NR: Floats) -> None:
    """Multiply v by the scales of pairs and the weights of entries."""
    for views, first, last in segments:
        if views.scales_R is not None:
            v_NR[first:last, : views.rank] *= views.scales_R
    scales = [views.scale for views, _, _ in segments]
    if step.weights_N is None and len(set(scales)) == 1:
        v_NR *= np.float32(scales[0])
        return
    factor_N = np.array(scales, np.float32).repeat([last - first for _, first, last in segments])
    v_NR *= (factor_N if step.weights_N is None else factor_N * step.weights_N.numpy())[:, None]


def _expand(segments: _Segments, v_NR: Floats, delta_NO: Floats) -> Iterator[None]:
    """Compute delta = v B for every entry, windows side by side; zero where no pair reaches."""
    for views, first, last in segments:
        v_nR, delta_nO = v_NR[first:last], delta_NO[first:last]
        if views.width < delta_nO.shape[1]:
            delta_nO[:] = 0.0
        for b_oR, ranks, columns in views.parts:
            v_nr, y_no = v_nR[:, ranks], delta_nO[:, columns]
            if y_no.size <= PART_ELEMENTS:  # nearly always: views cost what a small product does
                _times(v_nr, b_oR, y_no)
                yield
                continue
            num = max(PART_ELEMENTS // len(y_no), 1)
            for low in range(0, y_no.shape[1], num):
                _times(v_nr, b_oR[low : low + num], y_no[:, low : low + num])
                yield


def _times(x_nK: Floats, w_OK: Matrix, y_nO: Floats) -> None:
    """Compute y = x Wᵀ; rows of x and y contiguous."""
    matrix_OK = w_OK if isinstance(w_OK, np.ndarray) else w_OK.float().numpy()
    if len(x_nK) > FEW_ROWS or matrix_OK.size > SMALL_ELEMENTS or not matrix_OK.flags.c_contiguous:
        torch.mm(torch.from_numpy(x_nK), torch.from_numpy(matrix_OK).t(), out=torch.from_numpy(y_nO))
    elif len(x_nK) == 1:
        matrix_OK.dot(x_nK[0], y_nO[0])
    else:
        for x_K, y_O in zip(x_nK, y_nO, strict=True):
            matrix_OK.dot(x_K, y_O)
