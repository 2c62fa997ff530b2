"""Turns an engine's choice of experts into the segments of a step: on the GPU (source/route.cu), or slowly here.

Semantics (T tokens, k experts each; a pair is t * k + j, adapters[t] a row of the directory or -1):

    pairs = (t, j) with 0 <= adapters[t] < num_adapters, experts[t, j] in `among` (by default all experts), and an
            adapter that has tiles: one without has no delta at this site
    entries = pairs sorted by (adapters[t], experts[t, j], t * k + j)
    segments = runs of entries of one (adapter, expert):
        block table row, first tile of the adapter + expert * tiles of each expert, first entry, entries
    tokens = those with an entry, ascending; an entry's row is its token's place among them
    counts = number of segments, of entries, T, of tokens with an entry

An entry's `token` is gate_up's in_map; its `pair` is down's in_map, its `token` down's out_map. A client that
sends rows away counts tokens that travel: `row` instead of `token`. -1 stands for no adapter.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kernels_cuda.build import STANDARD, read_source
from kernels_cuda.cuda import on_device, on_torch_stream
from kernels_cuda.heuristics import STAGES, Variant
from kernels_cuda.sizes import ROUTE_DIGIT_BITS, ROUTE_PAIR_BITS
from kernels_cuda.tables import SEGMENT_INTS

MAX_PAIRS = 1 << ROUTE_PAIR_BITS
MAX_KEYS = 1 << 19
DIRECTORY_INTS = 3  # row of the block table, first tile, tiles of each expert
WARPS = 32
DIGITS = 1 << ROUTE_DIGIT_BITS


@dataclass(frozen=True)
class Route:
    """A step's segments and maps, in memory that the router overwrites; see `DeviceStep` for what they are."""

    segments: torch.Tensor  # int32 [at most, 4]
    counts: torch.Tensor  # int32 [4]
    token_N: torch.Tensor  # int32
    pair_N: torch.Tensor  # int32
    weights_N: torch.Tensor  # float32
    row_N: torch.Tensor | None = None  # int32
    token_M: torch.Tensor | None = None  # int32, of each row

    @staticmethod
    def empty(max_pairs: int, device: torch.device | str, max_rows: int = 0) -> Route:
        """Allocate for steps of up to `max_pairs` pairs; with `max_rows`, tokens that travel are counted, too."""

        def ints(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.int32, device=device)

        weights = torch.empty(max_pairs, dtype=torch.float32, device=device)
        rows = (ints(max_pairs), ints(max_rows)) if max_rows else (None, None)
        return Route(ints(max_pairs, SEGMENT_INTS), ints(4), ints(max_pairs), ints(max_pairs), weights, *rows)


class Choice(NamedTuple):
    """The choice of an engine's router, on the device, contiguous; see `Router.launch`.

    experts_Tk int32; weights_Tk float32, or None if the step has no routing weights; adapters_T int32, rows of
    `directory` or -1; directory int32 [num_adapters, 3]; among: the experts that count, by default all
    """

    experts_Tk: torch.Tensor
    weights_Tk: torch.Tensor | None
    adapters_T: torch.Tensor
    directory: torch.Tensor
    num_experts: int
    among: range | None = None

    @property
    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """The tensors that a launch reads."""
        return self[:4]


class Routed(NamedTuple):
    """The result of `reference`; its arrays have no unused ends."""

    segments: npt.NDArray[np.int32]
    token_N: npt.NDArray[np.int32]
    pair_N: npt.NDArray[np.int32]
    weights_N: npt.NDArray[np.float32]
    row_N: npt.NDArray[np.int32]
    token_M: npt.NDArray[np.int32]


def reference(
    experts_Tk: npt.NDArray[np.int32],
    weights_Tk: npt.NDArray[np.float32],
    adapters_T: npt.NDArray[np.int32],
    directory: npt.NDArray[np.int32],
    num_experts: int,
    among: range | None = None,
) -> Routed:
    """Compute the routing as the slow, obvious oracle: Python's sort, one pair at a time."""
    top_k, among = experts_Tk.shape[1], range(num_experts) if among is None else among
    entries = sorted(
        (int(adapters_T[t]), int(expert), t * top_k + j)
        for t, experts in enumerate(experts_Tk)
        for j, expert in enumerate(experts)
        if 0 <= adapters_T[t] < len(directory) and int(expert) in among and directory[adapters_T[t], 2] > 0
    )
    segments: list[list[int]] = []
    last = None
    for i, (adapter, expert, _) in enumerate(entries):
        if (adapter, expert) != last:
            row, first_tile, tiles_each = (int(value) for value in directory[adapter])
            segments.append([row, first_tile + expert * tiles_each, i, 0])
            last = (adapter, expert)
        segments[-1][3] += 1
    pairs = np.array([pair for _, _, pair in entries], np.int32)
    table = np.array(segments, np.int32).reshape(-1, SEGMENT_INTS)
    tokens = pairs // np.int32(top_k)
    token_M = np.array(sorted({int(token) for token in tokens}), np.int32)
    row_N = np.array([list(token_M).index(token) for token in tokens], np.int32)
    return Routed(table, tokens, pairs, weights_Tk.reshape(-1)[pairs], row_N, token_M)


def arguments(choice: Choice, route: Route) -> list[int]:
    """Return the kernel's arguments, 64 bits each. Raises ValueError for what does not fit; reads no device memory."""
    experts_Tk, weights_Tk, adapters_T, directory, num_experts, among = choice
    (tokens, top_k), num_adapters = experts_Tk.shape, directory.shape[0]
    if not 1 <= tokens * top_k <= min(MAX_PAIRS, route.token_N.shape[0]):
        raise ValueError(
            f"got {tokens} tokens of {top_k} experts, expected 1 to "
            f"{min(MAX_PAIRS, route.token_N.shape[0])} pairs; cut the step"
        )
    if num_adapters * num_experts >= MAX_KEYS:
        raise ValueError(
            f"got {num_adapters} adapters of {num_experts} experts, expected fewer than {MAX_KEYS} together; "
            "list only those that are in use"
        )
    if route.token_M is not None and route.token_M.shape[0] < tokens:
        raise ValueError(f"got {tokens} tokens, expected at most {route.token_M.shape[0]}; cut the step")
    for name, tensor, dtype, shape in (
        ("experts", experts_Tk, torch.int32, (tokens, top_k)),
        ("weights", weights_Tk, torch.float32, (tokens, top_k)),
        ("adapters", adapters_T, torch.int32, (tokens,)),
        ("directory", directory, torch.int32, (num_adapters, DIRECTORY_INTS)),
    ):
        if tensor is None and name == "weights":
            continue
        if tensor is None or tensor.dtype != dtype or tuple(tensor.shape) != shape or not tensor.is_contiguous():
            got = "None" if tensor is None else f"{tensor.dtype} {tuple(tensor.shape)}"
            raise ValueError(f"{name} is {got}, expected {dtype} {shape}, contiguous")
    among = range(num_experts) if among is None else among
    inputs = (experts_Tk, weights_Tk, adapters_T, directory)
    outputs = (route.segments, route.counts, route.token_N, route.pair_N, route.weights_N, route.row_N, route.token_M)
    pointers = (0 if tensor is None else tensor.data_ptr() for tensor in (*inputs, *outputs))
    return [*pointers, tokens, top_k, num_experts, num_adapters, among.start, among.stop]


def shared_bytes(warps: int) -> int:
    """Return the shared memory of the block: sizeof(BlockMemory) in source/route.cu."""
    nbytes = 2 * 4 * (MAX_PAIRS + MAX_PAIRS // 32) + 2 * DIGITS * warps * 32 + 4 * warps
    return -(-nbytes // 16) * 16


class Router:
    """The routing kernel of one GPU, compiled by NVRTC on first use (CuPy caches the result)."""

    def __init__(self, device: torch.device) -> None:
        import cupy

        self.device = device
        variant = Variant(bulk_copy=False, warps=WARPS, stages=STAGES)
        with on_device(device):
            self._module = cupy.RawModule(code=read_source("route.cu"), options=(STANDARD, *variant.defines))
            self._function = self._module.get_function("route")
            self._function.max_dynamic_shared_size_bytes = shared_bytes(WARPS)

    def launch(self, choice: Choice, route: Route) -> None:
        """Launch the kernel. Safe in CUDA graphs: one block, no allocation, torch's current stream.

        `route` is overwritten as far as `counts` says, and must alias nothing of the choice. Raises ValueError
        for what does not fit.
        """
        values = arguments(choice, route)
        with on_torch_stream(self.device):
            self._function((1,), (WARPS * 32,), tuple(values), shared_mem=shared_bytes(WARPS))


@cache
def router(device: torch.device) -> Router:
    """Return the router of a device, compiled once per process. The device must have an index."""
    return Router(device)
