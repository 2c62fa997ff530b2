"""A client with activations on a device: kernels put its steps where the shard finds them.

Arguments of kernels, and the memory of each step, are here; subclasses launch kernels and map memory:
device.client.cuda_ipc on a GPU. Steps go out in order on one queue of the device, beside
the engine's own; that queue waits for what the engine had queued when the step was pushed.
"""

from __future__ import annotations

from abc import abstractmethod

import msgspec
import torch
from typing_extensions import override

from kernels_cuda.routing import Choice, Route
from lora_server.device.client.put import Put
from lora_server.transport.base import Link
from lora_server.transport.rows import TwinRows
from lora_server.transport.shm import ShmLink
from lora_server.wire import slot
from lora_server.wire.messages import Hello
from lora_server.wire.slot import RequestHeader


class DeviceSteps(Link):
    """Steps of a client with activations on `device`; `twin` holds the rows, unless the slots do."""

    device: torch.device
    twin: TwinRows | None = None

    def _begin(self, device: torch.device) -> None:
        """Set the fields up; call it first."""
        self.device = device
        self._waiting: tuple[Put, Choice | None] | None = None
        self._routes: dict[int, Route] = {}  # of each slot
        self._finished = torch.zeros(1, dtype=torch.int32, device=device)
        self._no_rows = torch.zeros(1, 8, dtype=torch.bfloat16, device=device)

    @abstractmethod
    def _launch(self, step: Put, choice: Choice | None) -> None:
        """Route, if there is a choice, and put: in order, behind what the engine has queued. Does not wait."""

    @abstractmethod
    def _address(self, seq: int | None) -> int:
        """Return the device's address of a step's request slot; without a seq, of the request signal."""

    @override
    def put_rows(self, header: RequestHeader, x_TK: torch.Tensor, rows_M: torch.Tensor) -> None:
        x_TK = x_TK.to(self.device)  # a client with links of both kinds gives all of them the host's
        rows = rows_M.int() if rows_M.device == self.device else self._moved(rows_M.int())
        row_bytes = x_TK.shape[1] * slot.ELEMENT_BYTES[header.dtype]
        offset = slot.HEADER_BYTES + header.payload_bytes - len(rows) * row_bytes
        to = self._address(header.seq) + offset if self.twin is None else self.twin.request_address(header)
        self._waiting = self._step(header, x_TK, to, rows_M=rows), None

    def _moved(self, rows_M: torch.Tensor) -> torch.Tensor:
        """Copy row numbers from the host, without a wait."""
        return rows_M.to(self.device)

    @override
    def put_routed(self, header: RequestHeader, x_TK: torch.Tensor, choice: Choice, by_entry: bool) -> None:
        to = 0 if self.twin is None else self.twin.request_address(header)
        route = self._route(header.seq, choice)
        self._waiting = self._step(header, x_TK, to, route=route, by_entry=by_entry), choice

    @override
    def routed(self, seq: int) -> Route:
        return self._routes[seq % self.region.layout.depth]

    def _route(self, seq: int, choice: Choice) -> Route:
        """Return the slot's route; kernels and copies that used it before are ahead in the queue."""
        index, (tokens, top_k) = seq % self.region.layout.depth, choice.experts_Tk.shape
        route = self._routes.get(index)
        if route is None or route.token_M is None or len(route.token_M) < tokens or len(route.pair_N) < tokens * top_k:
            route = self._routes[index] = Route.empty(tokens * top_k, self.device, max_rows=tokens)
        return route

    def _scales(self, header: RequestHeader) -> int:
        """Return the address of the scales of a step with tables that the host has written."""
        counts = (header.num_segments, header.num_entries, header.flags)
        return self._address(header.seq) + slot.request_offsets(*counts, 0, header.num_rows).scales

    def _step(
        self,
        header: RequestHeader,
        x_TK: torch.Tensor,
        to: int,
        rows_M: torch.Tensor | None = None,
        route: Route | None = None,
        by_entry: bool = False,
    ) -> Put:
        in_codes = header.dtype == slot.E4M3
        return Put(
            x=x_TK if x_TK.stride(-1) == 1 else x_TK.contiguous(),
            to=to,
            slot=self._address(header.seq),
            signal=self._address(None),
            value=slot.signal(self.epoch, header.seq),
            finished=self._finished,
            rows_M=rows_M,
            route=route,
            by_entry=by_entry,
            in_codes=in_codes,
            scales=self._scales(header) if in_codes and route is None else 0,
        )

    def _nothing(self, seq: int) -> Put:
        """A step without rows."""
        return Put(
            x=self._no_rows,
            to=0,
            slot=self._address(seq),
            signal=self._address(None),
            value=slot.signal(self.epoch, seq),
            finished=self._finished,
            rows_M=self._finished[:0],
        )

    @override
    def push(self, seq: int, nbytes: int) -> None:
        """Without rows the kernel only signals, behind the steps that were pushed before."""
        waiting, self._waiting = self._waiting, None
        step, choice = waiting or (self._nothing(seq), None)
        self._launch(step, choice)


class DeviceLink(DeviceSteps, ShmLink):
    """The client's end; see Link."""

    def __init__(
        self, address: str, hello: Hello, shard: int, device: torch.device, wants_twin: bool, slots: bool = False
    ) -> None:
        self._begin(device)
        asks = msgspec.structs.replace(hello, device=True, twin=wants_twin, slots=slots)
        super().__init__(address, asks, shard)
        if self.twin is not None:
            self.transport, self.rows = "cuda_ipc", self.twin

    @override
    def push(self, seq: int, nbytes: int) -> None:
        super().push(seq, nbytes)
        self._ring()
