"""One LoRA step on a CPU: one shrink and one expand per (segment, pair), no rank padding.

Products of few rows and a small matrix are NumPy's, row by row: its views and calls cost less than torch's, and nothing
is repacked. All others are torch's GEMMs, which may use several threads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt
import torch

from kernels_cuda.ops import Step, placed

FEW_ROWS, SMALL_ELEMENTS = 4, 1 << 19  # at most: see bench/results/kernels_cpu-2026-11.md
PART_ELEMENTS = 1 << 21  # of a result, that are computed at a time: a millisecond or a few
Floats = npt.NDArray[np.float32]


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
    v_NR = torch.empty(step.num_entries, max((s.block.a_RK.shape[0] for s in step.segments), default=0))
    yield from _shrink(step, v_NR.numpy())
    _scale(step, v_NR)
    exact = out_UO.dtype == torch.float32
    direct = step.out_map_N is None and exact
    delta_NO = out_UO if direct else torch.empty(step.num_entries, step.out_width, dtype=torch.float32)
    yield from _expand(step, v_NR.numpy(), delta_NO.numpy())
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


def _shrink(step: Step, v_NR: Floats) -> Iterator[None]:
    """Compute v = x A for every entry: the ranks of a block's pairs side by side, the rest undefined."""
    rows_NK = step.rows_TK if step.in_map_N is None else step.rows_TK.index_select(0, step.in_map_N)
    x_NK = rows_NK.float().numpy()
    for block, first, num_entries in step.segments:
        if block.pairs:
            a_RK = _window(block.a_RK, step.in_begin, x_NK.shape[1])
            v_nR = v_NR[first : first + num_entries, : a_RK.shape[0]]
            _times(x_NK[first : first + num_entries], a_RK, v_nR)
            yield


def _window(a_RK: torch.Tensor, begin: int, width: int) -> torch.Tensor:
    """Return the columns of A that meet the rows' window, in float32."""
    return (a_RK if a_RK.shape[1] == width else a_RK[:, begin : begin + width]).float()


def _scale(step: Step, v_NR: torch.Tensor) -> None:
    """Multiply v by the scales of pairs and the weights of entries: in one call, unless the pairs of a block differ."""
    scales, counts = list[float](), list[int]()
    for block, first, num_entries in step.segments:
        of_pairs = {pair.scale for pair in block.pairs}
        if len(of_pairs) > 1:
            ranks = [pair.a_RK.shape[0] for pair in block.pairs]
            v_nR = v_NR[first : first + num_entries, : sum(ranks)]
            for pair, v_nr in zip(block.pairs, torch.split(v_nR, ranks, dim=1), strict=True):
                v_nr.mul_(pair.scale)
        scales.append(of_pairs.pop() if len(of_pairs) == 1 else 1.0)
        counts.append(num_entries)
    if step.weights_N is None and len(set(scales)) == 1:
        v_NR.mul_(scales[0])
        return
    factor_N = torch.from_numpy(np.array(scales, np.float32).repeat(counts))
    v_NR.mul_((factor_N if step.weights_N is None else factor_N * step.weights_N)[:, None])


def _expand(step: Step, v_NR: Floats, delta_NO: Floats) -> Iterator[None]:
    """Compute delta = v B for every entry, windows side by side; zero where no pair reaches."""
    for block, first, num_entries in step.segments:
        last, column, covered = first + num_entries, 0, 0
        parts = [placed(pair, step.windows) for pair in block.pairs]
        for part in parts:
            for b_oR, _ in part:
                covered += b_oR.shape[0]
        if covered < delta_NO.shape[1]:
            delta_NO[first:last] = 0.0
        for pair, part in zip(block.pairs, parts, strict=True):
            v_nR = v_NR[first:last, column : column + pair.a_RK.shape[0]]
            for b_oR, begin in part:
                for b_pR, low in _some_of(b_oR, num_entries):
                    y_np = delta_NO[first:last, begin + low : begin + low + b_pR.shape[0]]
                    _times(v_nR, b_pR.float(), y_np)
                    yield
            column += pair.a_RK.shape[0]


def _some_of(b_oR: torch.Tensor, num_entries: int) -> Iterable[tuple[torch.Tensor, int]]:
    """Cut B so that a result of so many entries has PART_ELEMENTS elements; return (rows of B, the first's index)."""
    if b_oR.shape[0] * num_entries <= PART_ELEMENTS:  # nearly always: a view would cost what a small GEMM does
        return ((b_oR, 0),)
    num = max(PART_ELEMENTS // num_entries, 1)
    return ((b_oR[low : low + num], low) for low in range(0, b_oR.shape[0], num))


def _times(x_nK: Floats, w_OK: torch.Tensor, y_nO: Floats) -> None:
    """Compute y = x Wᵀ; W of any float dtype that NumPy has, rows of x and y contiguous."""
    if len(x_nK) > FEW_ROWS or w_OK.numel() > SMALL_ELEMENTS or not w_OK.is_contiguous():
        torch.mm(torch.from_numpy(x_nK), w_OK.t(), out=torch.from_numpy(y_nO))
        return
    matrix_OK = w_OK.numpy()
    for x_K, y_O in zip(x_nK, y_nO, strict=True):
        matrix_OK.dot(x_K, out=y_O)
