"""From an engine's choice of experts to the segments of a step, on the GPU (source/route.cu) and, slowly, here.

Semantics (T tokens, k experts each; a pair is t * k + j, adapters[t] a row of the directory or -1):

    pairs = those (t, j) with 0 <= adapters[t] < num_adapters and 0 <= experts[t, j] < num_experts
    entries = pairs sorted by (adapters[t], experts[t, j], t * k + j)
    segments = runs of entries of one (adapter, expert):
        block table row, first tile of the adapter + expert * tiles of each expert, first entry, entries
    counts = number of segments, of entries, T

An entry's `token` is gate_up's in_map; its `pair` is down's in_map, its `token` down's out_map. -1 stands
for no adapter, and for an expert of another shard: such pairs never reach the step.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kernels_cuda.build import STANDARD, read_source
from kernels_cuda.cuda import on_torch_stream
from kernels_cuda.heuristics import STAGES, Variant
from kernels_cuda.tables import SEGMENT_INTS

MAX_PAIRS = 1 << 13  # a pair's number and its key lie in one word of 32 bits: see route.cu
MAX_KEYS = 1 << 19
DIRECTORY_INTS = 3  # row of the block table, first tile, tiles of each expert
WARPS = 32
DIGITS = 16


@dataclass(frozen=True)
class Route:
    """A step's segments and maps, in memory that the router overwrites; see `DeviceStep` for what they are."""

    segments: torch.Tensor  # int32 [at most, 4]
    counts: torch.Tensor  # int32 [3]
    token_N: torch.Tensor  # int32
    pair_N: torch.Tensor  # int32
    weights_N: torch.Tensor  # float32

    @staticmethod
    def empty(max_pairs: int, device: torch.device | str) -> Route:
        """Room for steps of up to so many pairs."""

        def ints(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.int32, device=device)

        weights = torch.empty(max_pairs, dtype=torch.float32, device=device)
        return Route(ints(max_pairs, SEGMENT_INTS), ints(3), ints(max_pairs), ints(max_pairs), weights)


class Routed(NamedTuple):
    """What `reference` finds, cut to what there is."""

    segments: npt.NDArray[np.int32]
    token_N: npt.NDArray[np.int32]
    pair_N: npt.NDArray[np.int32]
    weights_N: npt.NDArray[np.float32]


def reference(
    experts_Tk: npt.NDArray[np.int32],
    weights_Tk: npt.NDArray[np.float32],
    adapters_T: npt.NDArray[np.int32],
    directory: npt.NDArray[np.int32],
    num_experts: int,
) -> Routed:
    """The slow, obvious oracle: Python's sort, one pair at a time."""
    top_k = experts_Tk.shape[1]
    entries = sorted(
        (int(adapters_T[t]), int(expert), t * top_k + j)
        for t, experts in enumerate(experts_Tk)
        for j, expert in enumerate(experts)
        if 0 <= adapters_T[t] < len(directory) and 0 <= expert < num_experts
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
    return Routed(table, pairs // np.int32(top_k), pairs, weights_Tk.reshape(-1)[pairs])


def arguments(
    experts_Tk: torch.Tensor,
    weights_Tk: torch.Tensor,
    adapters_T: torch.Tensor,
    directory: torch.Tensor,
    num_experts: int,
    route: Route,
) -> list[int]:
    """The kernel's arguments, all 64 bits wide. Raises ValueError for what does not fit; reads no device memory."""
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
    for name, tensor, dtype, shape in (
        ("experts", experts_Tk, torch.int32, (tokens, top_k)),
        ("weights", weights_Tk, torch.float32, (tokens, top_k)),
        ("adapters", adapters_T, torch.int32, (tokens,)),
        ("directory", directory, torch.int32, (num_adapters, DIRECTORY_INTS)),
    ):
        if tensor.dtype != dtype or tuple(tensor.shape) != shape or not tensor.is_contiguous():
            raise ValueError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}, expected {dtype} {shape}, contiguous")
    inputs = (experts_Tk, weights_Tk, adapters_T, directory)
    outputs = (route.segments, route.counts, route.token_N, route.pair_N, route.weights_N)
    return [*(tensor.data_ptr() for tensor in (*inputs, *outputs)), tokens, top_k, num_experts, num_adapters]


def shared_bytes(warps: int) -> int:
    """Shared memory of the block: sizeof(BlockMemory) in source/route.cu."""
    nbytes = 2 * 4 * (MAX_PAIRS + MAX_PAIRS // 32) + 2 * DIGITS * warps * 32 + 4 * warps
    return -(-nbytes // 16) * 16


class Router:
    """The routing kernel of one GPU, compiled by NVRTC on first use (CuPy caches the result)."""

    def __init__(self, device: torch.device) -> None:
        import cupy

        self.device = device
        variant = Variant(bulk_copy=False, warps=WARPS, stages=STAGES)
        with cupy.cuda.Device(device.index):
            self._module = cupy.RawModule(code=read_source("route.cu"), options=(STANDARD, *variant.defines))
            self._function = self._module.get_function("route")
            self._function.max_dynamic_shared_size_bytes = shared_bytes(WARPS)

    def launch(
        self,
        experts_Tk: torch.Tensor,
        weights_Tk: torch.Tensor,
        adapters_T: torch.Tensor,
        directory: torch.Tensor,
        num_experts: int,
        route: Route,
    ) -> None:
        """Semantics: see this module. Safe in CUDA graphs: one block, no allocation, torch's current stream.

        experts_Tk int32 [T, k]; weights_Tk float32 [T, k]; adapters_T int32 [T], rows of `directory` or -1;
        directory int32 [num_adapters, 3]; all contiguous and on the device. `route` is overwritten as far as
        `counts` says, and aliases none of them. Raises ValueError for what does not fit.
        """
        values = arguments(experts_Tk, weights_Tk, adapters_T, directory, num_experts, route)
        with on_torch_stream(self.device):
            self._function((1,), (WARPS * 32,), tuple(values), shared_mem=shared_bytes(WARPS))


@cache
def router(device: torch.device) -> Router:
    """The router of a device with an index, compiled once per process."""
    return Router(device)
