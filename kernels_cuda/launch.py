"""One launch: what it computes on, its workspace, and the kernels' argument list (source/lora_step.cu)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels_cuda.layout import GROUP, MAX_RANK
from kernels_cuda.sizes import CHUNK, CHUNKS, TILE_BYTES

MAX_WINDOWS = 3
DTYPE_NAMES = {torch.bfloat16: "bfloat16", torch.float16: "float16"}


@dataclass(frozen=True, kw_only=True)
class DeviceStep:
    """A step with every array in device memory, so that a CUDA graph can hold its launch.

    rows_TK     bfloat16 or float16 [T, K or its window], contiguous
    segments    int32 [at most, 4]: block (row of `blocks`), first tile, first entry, entries; see tables
    blocks      uint8 [rows, 144]: a BlockTable's tensor; all of them are of one site
    counts      int32 [3]: segments, entries, output rows of this very step; the arrays' shapes give only the maxima
    in_map_N, out_map_N   int32 [at most N] or None;   weights_N   float32 [at most N] or None
    windows     (begin, end) of site output rows, at most 3, in order;  in_begin, in_width: the rows' window in K

    Rows of the result that no entry reaches are zero with an out_map, and untouched without one.
    """

    rows_TK: torch.Tensor
    segments: torch.Tensor
    blocks: torch.Tensor
    counts: torch.Tensor
    in_width: int
    windows: Sequence[tuple[int, int]]
    in_begin: int = 0
    in_map_N: torch.Tensor | None = None
    out_map_N: torch.Tensor | None = None
    weights_N: torch.Tensor | None = None

    @property
    def out_width(self) -> int:
        """Columns of the result."""
        return sum(end - begin for begin, end in self.windows)


@dataclass(frozen=True)
class Workspace:
    """Memory that a launch needs besides its inputs and its result; one launch at a time may use it.

    partial  float32 [ceil(max_in_width / 512), max_entries, max_rank];   v  float32 [max_entries, max_rank]
    delta    float32 [max_entries, max_out_width];   groups  int32 [max_entries];   arrivals  int64 [2], from 0
    """

    partial: torch.Tensor
    v: torch.Tensor
    delta: torch.Tensor
    groups: torch.Tensor
    arrivals: torch.Tensor

    @classmethod
    def new(
        cls, *, max_entries: int, max_rank: int, max_in_width: int, max_out_width: int, device: torch.device | str
    ) -> Workspace:
        """Allocate a workspace. max_rank: see `max_rank_of`; max_out_width: of steps with an out_map, 0 without any."""

        def floats(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.float32, device=device)

        rank = -(-max_rank // GROUP) * GROUP
        return cls(
            partial=floats(-(-max_in_width // (CHUNK * CHUNKS)), max_entries, rank),
            v=floats(max_entries, rank),
            delta=floats(max_entries, max_out_width),
            groups=torch.zeros(max_entries, dtype=torch.int32, device=device),
            arrivals=torch.zeros(2, dtype=torch.int64, device=device),
        )

    @property
    def max_entries(self) -> int:
        """Entries that a step may have."""
        return self.v.shape[0]

    @property
    def max_rank(self) -> int:
        """Ranks that a block may have, padded, all pairs together."""
        return self.v.shape[1]

    @property
    def max_in_width(self) -> int:
        """Columns that A may have."""
        return self.partial.shape[0] * CHUNK * CHUNKS

    @property
    def max_out_width(self) -> int:
        """Columns that a result may have that is summed per token."""
        return self.delta.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of device memory that it takes."""
        return sum(t.nbytes for t in (self.partial, self.v, self.delta, self.groups, self.arrivals))


def most_combined_entries(stages: int) -> int:
    """Return how many entries a step with an out_map may have: a warp lists a row's entries where its tiles were."""
    return stages * TILE_BYTES // 2


def arguments(step: DeviceStep, out_UO: torch.Tensor, workspace: Workspace, stages: int) -> list[int]:
    """Return the kernels' arguments, all 64 bits wide. Raises ValueError for a step that does not fit the workspace.

    Reads no device memory, so it does not check the values of maps and segments: they must be in range.
    """
    _check(step, out_UO, workspace, stages)
    windows = [bound for window in step.windows for bound in window]
    windows += [0] * (2 * MAX_WINDOWS - len(windows))
    tensors = (step.rows_TK, step.in_map_N, step.out_map_N, step.weights_N, step.segments, step.blocks, step.counts)
    scratch = (workspace.partial, workspace.v, workspace.delta, workspace.groups, workspace.arrivals)
    pointers = [0 if tensor is None else tensor.data_ptr() for tensor in (*tensors, out_UO, *scratch)]
    sizes = [workspace.max_entries, workspace.max_rank, step.rows_TK.shape[1], step.in_begin, step.in_width]
    return [*pointers, *sizes, step.out_width, len(step.windows), *windows]


def _check(step: DeviceStep, out_UO: torch.Tensor, workspace: Workspace, stages: int) -> None:
    rows = step.rows_TK
    if rows.dtype not in DTYPE_NAMES or out_UO.dtype != rows.dtype:
        raise ValueError(f"rows are {rows.dtype}, results {out_UO.dtype}; expected both bfloat16 or both float16")
    if not 1 <= len(step.windows) <= MAX_WINDOWS:
        raise ValueError(f"got {len(step.windows)} output windows, expected 1 to {MAX_WINDOWS}")
    if out_UO.shape[1] != step.out_width or not (out_UO.is_contiguous() and rows.is_contiguous()):
        raise ValueError(f"the result is {tuple(out_UO.shape)}, expected {step.out_width} columns, contiguous")
    if not 0 <= step.in_begin < step.in_begin + rows.shape[1] <= step.in_width <= workspace.max_in_width:
        raise ValueError(
            f"rows are columns [{step.in_begin}, {step.in_begin + rows.shape[1]}) of {step.in_width}, "
            f"expected them within the workspace's {workspace.max_in_width}"
        )
    if step.out_map_N is not None and step.out_width > workspace.max_out_width:
        raise ValueError(f"got {step.out_width} columns to combine, expected at most {workspace.max_out_width}")
    per_entry = (step.in_map_N, step.out_map_N, step.weights_N, rows)
    entries = next(tensor.shape[0] for tensor in per_entry if tensor is not None)
    most = workspace.max_entries
    if step.out_map_N is not None:
        most = min(most, most_combined_entries(stages))
    if entries > most:
        raise ValueError(f"got a step of {entries} entries, expected at most {most}; cut it")
    for name, tensor, dtype in (
        ("segments", step.segments, torch.int32),
        ("counts", step.counts, torch.int32),
        ("blocks", step.blocks, torch.uint8),
        ("in_map", step.in_map_N, torch.int32),
        ("out_map", step.out_map_N, torch.int32),
        ("weights", step.weights_N, torch.float32),
    ):
        if tensor is not None and (tensor.dtype != dtype or not tensor.is_contiguous()):
            raise ValueError(f"{name} is {tensor.dtype}, expected {dtype}, contiguous")


def max_rank_of(ranks: Sequence[int]) -> int:
    """Return the max_rank of a workspace for pairs of these ranks; raises ValueError for a rank out of range."""
    for rank in ranks:
        if not 1 <= rank <= MAX_RANK:
            raise ValueError(f"got rank {rank}, expected 1 to {MAX_RANK}")
    return sum(-(-rank // GROUP) * GROUP for rank in ranks)
