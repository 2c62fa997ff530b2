"""From a checked request to the rows of its response: on the host, or on a GPU.

A compute returns when the response's rows are where the transport takes them from. On a GPU, rows
and results of a client on the same host stay in device memory (the twin of its region, see
transport.cuda_ipc); those of any other client are copied from and to its slots.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch

from kernels_cuda.launch import DeviceStep, Workspace
from kernels_cuda.ops import Block, Segment, Step
from kernels_cuda.tables import BlockTable, Packed, segment_table
from lora_server.errors import ProtocolError
from lora_server.spec import ModelSpec
from lora_server.transport.base import Connection
from lora_server.worker.request import Request, response_rows

Launch = Callable[[DeviceStep, torch.Tensor, Workspace], None]


class Compute(ABC):
    """One shard's; used by its loop alone."""

    @abstractmethod
    def run(self, request: Request, segments: Sequence[Segment[Any]], connection: Connection) -> None:
        """Fill the response slot's rows. Raises ProtocolError for rows of a dtype that it cannot serve."""


class HostCompute(Compute):
    """Slots are the tensors; segments are Blocks."""

    def __init__(self, kernel: Callable[[Step[Block], torch.Tensor], None]) -> None:
        self._kernel = kernel

    def run(self, request: Request, segments: Sequence[Segment[Block]], connection: Connection) -> None:
        """See Compute."""
        header = request.header
        step = Step(
            rows_TK=request.rows_TK,
            segments=segments,
            num_entries=header.num_entries,
            num_out_rows=header.num_out_rows,
            windows=header.windows,
            in_begin=header.in_begin,
            in_map_N=request.in_map_N,
            out_map_N=request.out_map_N,
            weights_N=request.weights_N,
        )
        self._kernel(step, response_rows(connection.region.response(header.seq), header))


class DeviceCompute(Compute):
    """Segments are Packed; `launch` is `CudaKernels.launch`, or a stand-in with the same contract."""

    def __init__(
        self, launch: Launch, table: BlockTable, spec: ModelSpec, dtype: torch.dtype, max_step_rows: int
    ) -> None:
        sites = list(spec.sites())
        self._launch, self._table, self._spec, self._dtype = launch, table, spec, dtype
        self._device = table.tensor.device
        self._widest_in = max(spec.in_width(site) for site in sites)
        self._widest_out = max(spec.out_width(site) for site in sites)
        self._max_step_rows = max_step_rows
        self._workspace = self._new_workspace(16)

    def _new_workspace(self, max_rank: int) -> Workspace:
        return Workspace.new(
            max_entries=self._max_step_rows,
            max_rank=max_rank,
            max_in_width=self._widest_in,
            max_out_width=self._widest_out,
            device=self._device,
        )

    def run(self, request: Request, segments: Sequence[Segment[Packed]], connection: Connection) -> None:
        """See Compute."""
        header = request.header
        if request.rows_TK.dtype != self._dtype:
            raise ProtocolError(
                f"{header.where}: got {request.rows_TK.dtype} rows, expected {self._dtype}; run the engine in it, "
                "or start the server with the engine's --dtype (bfloat16 or float16 on a GPU)"
            )
        rank = max((segment.block.max_rank for segment in segments), default=0)
        if rank > self._workspace.max_rank:
            self._workspace = self._new_workspace(rank)
        host_rows = response_rows(connection.region.response(header.seq), header)
        twin = connection.region.twin
        step = self._step(request, segments, request.rows_TK if twin is None else twin.request_rows(header))
        out_UO = torch.empty(host_rows.shape, dtype=self._dtype, device=self._device)
        target = out_UO if twin is None else twin.response_rows(header)
        self._launch(step, target, self._workspace)
        if twin is None:
            host_rows.copy_(out_UO)  # waits for the launch
        elif target.is_cuda:
            torch.cuda.current_stream(self._device).synchronize()

    def _step(self, request: Request, segments: Sequence[Segment[Packed]], rows_TK: torch.Tensor) -> DeviceStep:
        header = request.header
        counts = torch.tensor([len(segments), header.num_entries, header.num_out_rows], dtype=torch.int32)
        return DeviceStep(
            rows_TK=rows_TK.to(self._device),
            segments=segment_table(segments).to(self._device),
            blocks=self._table.tensor,
            counts=counts.to(self._device),
            in_width=self._spec.in_width(request.site),
            windows=header.windows,
            in_begin=header.in_begin,
            in_map_N=_moved(request.in_map_N, self._device),
            out_map_N=_moved(request.out_map_N, self._device),
            weights_N=_moved(request.weights_N, self._device),
        )


def _moved(tensor: torch.Tensor | None, device: torch.device) -> torch.Tensor | None:
    return None if tensor is None else tensor.to(device)
