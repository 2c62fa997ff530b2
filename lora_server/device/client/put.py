"""The kernel that puts a step into a shard's memory (put.cu): its arguments, and its launch.

There are two kinds of step: the host has written header and tables of one; the other was routed on the GPU, and the
host knows neither its counts nor its rows; see kernels_cuda.routing.Route.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch

from kernels_cuda.build import STANDARD, read_source
from kernels_cuda.cuda import on_device, on_torch_stream
from kernels_cuda.launch import DTYPE_NAMES
from kernels_cuda.routing import Route
from lora_server.device.protocol.cuda_kernels import PUT, PUT_BLOCKS
from lora_server.device.protocol.source import FILES

VECTOR_BYTES = 16
TO_CODES = {dtype: f"put_e4m3_{name}" for dtype, name in (DTYPE_NAMES | {torch.float32: "float32"}).items()}
KERNELS = ("put_vectors", "put_halves", *TO_CODES.values())


class PutPlace(NamedTuple):
    """The place of a step: addresses of its slot and of the signal, which becomes `value`; finished: int32 [1], 0."""

    slot: int
    signal: int
    value: int
    finished: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class Put:
    """One step. Addresses are the device's; `to` is 0 where rows lie behind the tables of the slot.

    x: [.., K] 16- or 32-bit, rows contiguous;  rows_M int32 on the device, rows of x, which is null if routed
    by_entry: of a routed step: a row per entry, weighted and summed per token, instead of a row per token
    in_codes: rows travel as e4m3; `scales` is where those of the rows at `to` go
    """

    x: torch.Tensor
    to: int
    place: PutPlace
    rows_M: torch.Tensor | None = None
    route: Route | None = None
    by_entry: bool = False
    in_codes: bool = False
    scales: int = 0

    @property
    def kernel(self) -> str:
        """The kernel's name: 16 bytes at a time where all addresses and sizes are multiples of that."""
        x = self.x
        if self.in_codes:
            return TO_CODES[x.dtype]
        parts = (x.data_ptr(), self.to, self.place.slot, self._row_bytes, x.stride(0) * x.element_size())
        return "put_halves" if any(part % VECTOR_BYTES for part in parts) else "put_vectors"

    @property
    def sent_bytes(self) -> int:
        """Bytes of the rows that the host knows of, as they travel."""
        rows = 0 if self.rows_M is None else len(self.rows_M)
        return rows * (self.x.shape[1] if self.in_codes else self._row_bytes)

    @property
    def _row_bytes(self) -> int:
        return self.x.shape[1] * self.x.element_size()

    def arguments(self) -> list[int]:
        """Return the kernel's arguments, all 64 bits wide. Raises ValueError for what it cannot take."""
        x, route, place = self.x, self.route, self.place
        if x.dim() != 2 or x.stride(1) != 1:
            raise ValueError(f"got activations of {tuple(x.shape)} with strides {x.stride()}, expected contiguous rows")
        if self.in_codes and x.dtype not in TO_CODES:
            raise ValueError(f"got {x.dtype} activations, expected bfloat16, float16 or float32")
        counts = segments = row_map = weights = None
        rows = self.rows_M
        if route is not None:
            rows = route.pair_N if self.by_entry else route.token_M
            counts, segments, row_map = route.counts, route.segments, route.row_N
            weights = route.weights_N if self.by_entry else None
        for name, table in (("rows", rows), ("map", row_map)):
            if table is None and (route is not None or name == "rows"):
                raise ValueError(f"got a step without {name}")
            if table is not None and (table.dtype != torch.int32 or not table.is_contiguous()):
                raise ValueError(f"{name} is {table.dtype}, expected int32, contiguous")
        pointers = [0 if tensor is None else tensor.data_ptr() for tensor in (counts, segments, row_map, weights)]
        assert rows is not None
        step = [x.data_ptr(), rows.data_ptr(), self.to, place.slot, *pointers]
        done = [place.finished.data_ptr(), place.signal, place.value]
        return [*step, *done, len(rows), self._row_bytes, x.stride(0) * x.element_size(), self.scales]


@cache
def _kernels(device: torch.device) -> dict[str, Any]:
    import cupy

    with on_device(device):
        module = cupy.RawModule(code=read_source("put.cu", FILES), options=(STANDARD, *PUT.defines))
        return {name: module.get_function(name) for name in KERNELS}


def try_out(stream: torch.cuda.Stream, device: torch.device) -> None:
    """Put no rows, so that what cannot work fails here, and nothing is compiled in the first step.

    Raises ImportError, RuntimeError, or whatever a CuPy raises that is broken or too old.
    """
    with torch.cuda.stream(stream):
        x, finished = (
            torch.zeros(1, 8, dtype=torch.bfloat16, device=device),
            torch.zeros(2, dtype=torch.int32, device=device),
        )
        said = torch.zeros(1, dtype=torch.int64, device=device)
    step = Put(x=x, to=0, place=PutPlace(0, said.data_ptr(), 7, finished), rows_M=finished[:0])
    launch(step, stream)
    stream.synchronize()
    if int(said) != 7:
        raise RuntimeError("the put kernel ran and signalled nothing")


def launch(step: Put, stream: torch.cuda.Stream) -> None:
    """Launch on a stream, beside all others; return at once. Raises ValueError; see Put."""
    import cupy

    numbers = tuple(cupy.uint64(value) for value in step.arguments())
    with torch.cuda.stream(stream), on_torch_stream(step.x.device):
        _kernels(step.x.device)[step.kernel]((PUT_BLOCKS,), (PUT.warps * 32,), numbers)
