"""Compute the rows of a response from a checked request, on the host or on a GPU.

After its last part the rows are where the transport takes them from. Memory of a connection on the compute's own device
is read and written in place; any other is copied.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from typing_extensions import override

from kernels_cuda.launch import DeviceStep, Workspace
from kernels_cuda.ops import Segment, Step
from kernels_cuda.tables import SEGMENT_INTS, BlockTable, PackedSegments
from lora_server.errors import ProtocolError, StepError
from lora_server.shard.request import Request
from lora_server.spec import ModelSpec
from lora_server.transport import e4m3
from lora_server.transport.base import Connection
from lora_server.transport.rows import TORCH_DTYPES
from lora_server.wire import slot

Launch = Callable[[DeviceStep, torch.Tensor, Workspace], None]


class DeviceLostError(Exception):
    """The GPU does not recover in this process: the shard has to exit, and is restarted."""


class Compute(ABC):
    """Used by the shard's loop alone."""

    @abstractmethod
    def parts(self, request: Request, segments: Any, connection: Connection) -> Iterator[None]:
        """Fill the response slot's rows, and yield between parts; `segments`: gathered by the shard's store.

        Raises ProtocolError for rows of a dtype that it cannot serve.
        """


class HostCompute(Compute):
    """Computes on the slots themselves."""

    def __init__(self, kernel: Callable[[Step, torch.Tensor], Iterator[None]]) -> None:
        self._kernel = kernel

    @override
    def parts(self, request: Request, segments: Sequence[Segment], connection: Connection) -> Iterator[None]:
        header, rows_TK = request.header, connection.rows.request(request.header)
        exact = header.dtype != slot.E4M3
        step = Step(
            rows_TK=rows_TK if exact else e4m3.expand(rows_TK),
            segments=segments,
            num_entries=header.num_entries,
            num_out_rows=header.num_out_rows,
            windows=header.windows,
            in_begin=header.in_begin,
            in_map_N=_tensor(request.in_map_N),
            out_map_N=_tensor(request.out_map_N),
            weights_N=_tensor(request.weights_N),
        )
        if exact:
            yield from self._kernel(step, connection.rows.response(header))
            return
        out_UO = torch.empty(header.num_out_rows, header.out_width)
        yield from self._kernel(step, out_UO)
        connection.rows.answer(header, out_UO)


def _tensor(table: npt.NDArray[Any] | None) -> torch.Tensor | None:
    return None if table is None else torch.from_numpy(table)


class DeviceCompute(Compute):
    """`launch` is `CudaKernels.launch`, or a stand-in with the same contract."""

    def __init__(
        self,
        launch: Launch,
        table: BlockTable,
        spec: ModelSpec,
        dtype: torch.dtype,
        max_step_rows: int,
        lost: Callable[[], bool] = lambda: False,
    ) -> None:
        """`lost` is called after an error; it returns True if the device does not recover."""
        sites = list(spec.sites())
        self._lost = lost
        self._launch, self._table, self._spec, self._dtype = launch, table, spec, dtype
        self._device = table.tensor.device
        self._new_workspace = functools.partial(
            Workspace.new,
            max_entries=max_step_rows,
            max_in_width=max(spec.in_width(site) for site in sites),
            max_out_width=max(spec.out_width(site) for site in sites),
            device=self._device,
        )
        self._workspace = self._new_workspace(max_rank=16)
        # counts, at most one segment per entry, two maps and the weights, each rounded up to 4
        self._staging = _Staging(4 + (SEGMENT_INTS + 3) * (max_step_rows + 4), self._device)

    @override
    def parts(self, request: Request, segments: PackedSegments, connection: Connection) -> Iterator[None]:
        """Compute all at once: a GPU serves a step in the time of a part. Raises DeviceLostError after an error from
        which the GPU does not recover."""
        self.run(request, segments, connection)
        yield

    def run(self, request: Request, segments: PackedSegments, connection: Connection) -> None:
        """Compute a whole step; see `parts`."""
        dtype = TORCH_DTYPES[request.header.dtype]
        if dtype != self._dtype and request.header.dtype != slot.E4M3:
            raise ProtocolError(
                f"{request.header.where}: got {dtype} rows, expected {self._dtype}; run the engine in "
                "it, or start the server with the engine's --dtype (bfloat16 or float16 on a GPU)"
            )
        try:
            self._run(request, segments, connection)
        except torch.OutOfMemoryError as error:
            raise StepError(
                f"{request.header.where}: {error}; start the server with a smaller --device-pool"
            ) from error
        except RuntimeError as error:
            if self._lost():
                raise DeviceLostError(f"{request.header.where}: {error}") from error
            raise

    def _run(self, request: Request, segments: PackedSegments, connection: Connection) -> None:
        if segments.max_rank > self._workspace.max_rank:
            self._workspace = self._new_workspace(max_rank=segments.max_rank)
        rows_TK = connection.rows.request(request.header).to(self._device, non_blocking=True)
        out_UO = connection.rows.response(request.header)
        if request.header.dtype == slot.E4M3:
            rows_TK = e4m3.expand(rows_TK).to(self._dtype)
        in_place = out_UO.device == self._device and out_UO.dtype == self._dtype
        here = out_UO if in_place else torch.empty_like(out_UO, device=self._device, dtype=self._dtype)
        self._launch(self._step(request, segments, rows_TK), here, self._workspace)
        if not in_place:
            connection.rows.answer(request.header, here)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def _step(self, request: Request, segments: PackedSegments, rows_TK: torch.Tensor) -> DeviceStep:
        header = request.header
        counts = np.array([len(segments.table_S4), header.num_entries, header.num_out_rows], np.int32)
        weights = None if request.weights_N is None else request.weights_N.view(np.int32)
        tables = self._staging.send((counts, segments.table_S4, request.in_map_N, request.out_map_N, weights))
        counts_on_device, segments_on_device, in_map, out_map, weights_on_device = tables
        assert counts_on_device is not None and segments_on_device is not None
        return DeviceStep(
            rows_TK=rows_TK,
            segments=segments_on_device.view(-1, SEGMENT_INTS),
            blocks=self._table.tensor,
            counts=counts_on_device,
            in_width=self._spec.in_width(request.site),
            windows=header.windows,
            in_begin=header.in_begin,
            in_map_N=in_map,
            out_map_N=out_map,
            weights_N=None if weights_on_device is None else weights_on_device.view(torch.float32),
        )


class _Staging:
    """The small tables of a step, in one copy: pinned host memory to device memory, each table 16-byte aligned."""

    def __init__(self, max_ints: int, device: torch.device) -> None:
        self._host = torch.zeros(max_ints, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._host_ints: npt.NDArray[np.int32] = self._host.numpy()  # the same memory
        self._device = torch.zeros(max_ints, dtype=torch.int32, device=device)

    def send(self, tables: Sequence[npt.NDArray[np.int32] | None]) -> list[torch.Tensor | None]:
        """int32 tables, as flat views on the device. The previous step has ended, so its copies may be overwritten."""
        places, end = list[tuple[int, int] | None](), 0
        for table in tables:
            if table is None:
                places.append(None)
                continue
            self._host_ints[end : end + table.size] = table.reshape(-1)
            places.append((end, end + table.size))
            end += -(-table.size // 4) * 4
        self._device[:end].copy_(self._host[:end], non_blocking=True)
        return [None if place is None else self._device[slice(*place)] for place in places]
