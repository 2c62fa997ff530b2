"""The steps of a client with activations on a device: arguments of the kernel that puts each, and the memory it uses.

A link launches them, in order, on one queue of the device beside the engine's own; that queue waits for what the engine
had queued when the step was pushed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels_cuda.routing import Choice, Route
from lora_server.device.client.put import Put, PutPlace
from lora_server.transport.rows import MirrorRows
from lora_server.wire import slot
from lora_server.wire.slot import RequestHeader


class DeviceSteps:
    """The puts of one link. Addresses are the device's; `mirror` holds the rows, unless the slots do."""

    def __init__(
        self, device: torch.device, epoch: int, slots: Sequence[int], signal: int, mirror: MirrorRows | None = None
    ) -> None:
        self._device, self._epoch, self._slots, self._signal, self._mirror = device, epoch, slots, signal, mirror
        self._waiting: tuple[Put, Choice | None] | None = None
        self._routes: dict[int, Route] = {}  # of each slot
        self._finished = torch.zeros(1, dtype=torch.int32, device=device)
        self._no_rows = torch.zeros(1, 8, dtype=torch.bfloat16, device=device)

    def slot(self, seq: int) -> int:
        """Return the address of a step's request slot."""
        return self._slots[seq % len(self._slots)]

    def put_rows(self, header: RequestHeader, x_TK: torch.Tensor, rows_M: torch.Tensor) -> None:
        """See Link.put_rows."""
        x_TK = x_TK.to(self._device)  # a client with links of both kinds gives all of them the host's
        rows = rows_M.int()
        if rows.device != self._device:
            rows = rows.pin_memory().to(self._device, non_blocking=True)
        at, in_codes = self.slot(header.seq), header.dtype == slot.E4M3
        if self._mirror is None:
            row_bytes = x_TK.shape[1] * slot.ELEMENT_BYTES[header.dtype]
            to = at + slot.HEADER_BYTES + header.payload_bytes - len(rows) * row_bytes
        else:
            to = self._mirror.request_address(header)
        tables = slot.request_offsets(header.num_segments, header.num_entries, header.flags, 0, header.num_rows)
        scales = at + tables.scales if in_codes else 0
        put = Put(
            x=_contiguous(x_TK), to=to, place=self._place(header.seq), rows_M=rows, in_codes=in_codes, scales=scales
        )
        self._waiting = put, None

    def put_routed(self, header: RequestHeader, x_TK: torch.Tensor, choice: Choice, by_entry: bool) -> None:
        """See Link.put_routed."""
        to = 0 if self._mirror is None else self._mirror.request_address(header)
        route, place, in_codes = self._route(header.seq, choice), self._place(header.seq), header.dtype == slot.E4M3
        put = Put(x=_contiguous(x_TK), to=to, place=place, route=route, by_entry=by_entry, in_codes=in_codes)
        self._waiting = put, choice

    def routed(self, seq: int) -> Route:
        """See Link.routed."""
        return self._routes[seq % len(self._slots)]

    def take(self, seq: int) -> tuple[Put, Choice | None]:
        """Return the step to launch, and the choice to route first. Without rows the step only signals."""
        waiting, self._waiting = self._waiting, None
        return waiting or (Put(x=self._no_rows, to=0, place=self._place(seq), rows_M=self._finished[:0]), None)

    def _route(self, seq: int, choice: Choice) -> Route:
        """Return the slot's route; kernels and copies that used it before are ahead in the queue."""
        index, (tokens, top_k) = seq % len(self._slots), choice.experts_Tk.shape
        route = self._routes.get(index)
        if route is None or route.token_M is None or len(route.token_M) < tokens or len(route.pair_N) < tokens * top_k:
            route = self._routes[index] = Route.empty(tokens * top_k, self._device, max_rows=tokens)
        return route

    def _place(self, seq: int) -> PutPlace:
        return PutPlace(self.slot(seq), self._signal, slot.signal(self._epoch, seq), self._finished)


def _contiguous(x_TK: torch.Tensor) -> torch.Tensor:
    """Return x with contiguous rows."""
    return x_TK if x_TK.stride(-1) == 1 else x_TK.contiguous()
