"""A link in an engine's CUDA graphs: put, wait and add are launches with arguments that never change.

    captured = Captured(link)
    site = captured.site(header, x, route, by_entry)   once, before the capture
    site.put()                                         behind what wrote x and the route; beside the engine's GEMM
    site.add(y, column)                                behind the GEMM: waits for the answer, then adds
    captured.finish()                                  once per pass, by the host: raises what went wrong in it
    captured.take_over(newer)                          after joining anew: what was captured goes on with that link

A site's step is in flight from its put to its last add; up to `depth` sites, each with a route of its own, may be.

Steps without entries send nothing. After a failure the rest of the pass does nothing: its requests are void. A link
is used like this or through Link, not both: here the GPU counts the steps.
"""

from __future__ import annotations

import copy

import torch

from kernels_cuda import routing
from kernels_cuda.launch import DTYPE_NAMES
from kernels_cuda.routing import Choice, Route
from lora_server.device.client.link import KernelLink
from lora_server.device.client.put import VECTOR_BYTES
from lora_server.device.protocol.codes import LinkStatus
from lora_server.errors import LoraServerError, ProtocolError, rebuild
from lora_server.wire import slot
from lora_server.wire.slot import RequestHeader, ResponseHeader


class CapturedSite:
    """One site's step on one link. Keeps what its kernels read."""

    def __init__(
        self, captured: Captured, header: RequestHeader, x_TK: torch.Tensor, route: Route, by_entry: bool
    ) -> None:
        """header: all of it that does not change; counts, seq and budget are the GPU's. Raises ProtocolError."""
        if x_TK.dtype not in DTYPE_NAMES or x_TK.stride(1) != 1 or route.row_N is None or route.token_M is None:
            raise ProtocolError(
                f"got {x_TK.dtype} activations with strides {x_TK.stride()}, expected contiguous 16-bit rows, and a "
                "route that counts tokens"
            )
        memory = bytearray(slot.HEADER_BYTES)
        header.pack_into(memoryview(memory))
        self._header = torch.frombuffer(memory, dtype=torch.uint8).to(captured.link.device)
        self._seq = torch.zeros(1, dtype=torch.int64, device=captured.link.device)  # of its step; 0: none was sent
        self._captured, self._x, self._route, self._by_entry = captured, x_TK, route, by_entry
        self._has_waited = False  # for the step that was put last
        self._windows, self._dtype = header.windows, DTYPE_NAMES[x_TK.dtype]
        if header.dtype == slot.E4M3:
            self._dtype = f"e4m3_{self._dtype}"
        captured.link.gpu.settle()

    @property
    def link(self) -> KernelLink:
        """The link that it is put on now."""
        return self._captured.link

    def of(self, x_TK: torch.Tensor) -> CapturedSite:
        """Return the site for a pass with its activations elsewhere: as many columns, of the same dtype."""
        other = copy.copy(self)
        other._x = x_TK
        return other

    def put(self, choice: Choice | None = None) -> None:
        """Send the rows of the entries that the route has, if it has any, after what the engine has queued.

        With a choice the route is made of it first.
        """
        x, route, by_entry, link = self._x, self._route, self._by_entry, self._captured.link
        rows, weights = (route.pair_N, route.weights_N) if by_entry else (route.token_M, None)
        assert rows is not None and route.row_N is not None
        row_bytes, stride = 2 * x.shape[1], 2 * x.stride(0)
        halves = any(size % VECTOR_BYTES for size in (x.data_ptr(), row_bytes, stride))
        way = self._dtype if self._dtype.startswith("e4m3") else "halves" if halves else "vectors"
        self._has_waited = False
        tensors = (self._seq, self._header, x, route.counts, route.segments, rows, route.row_N)
        pointers = [link.state.address, *(tensor.data_ptr() for tensor in tensors)]
        link.queue.follow_engine()
        if choice is not None:
            link.queue.launch("route", *routing.arguments(choice, route))
        link.queue.launch(
            f"link_put_{way}",
            *pointers,
            0 if weights is None else weights.data_ptr(),
            row_bytes,
            stride,
        )

    def wait(self) -> None:
        """Wait, and add nothing, until the answer is there, the budget is over, or the watchdog ends it."""
        link, self._has_waited = self._captured.link, True
        link.queue.launch("link_wait", link.state.address, self._seq.data_ptr())

    def add(self, y: torch.Tensor, window: int = 0, column: int = 0) -> None:
        """Add a window of the answer to columns [column, ..) of y: see `add_columns`."""
        begin, end = self._windows[window]
        skip = sum(last - first for first, last in self._windows[:window])
        self.add_columns(y[:, column : column + end - begin], skip)

    def add_columns(self, y: torch.Tensor, skip: int) -> None:
        """Add the answer's columns from `skip` on to y: a row per entry's pair, or per token, of the route; see `wait`.

        It follows what the engine has queued; what the engine queues next waits for it. Raises ProtocolError for
        columns that the kernel cannot add in pairs.
        """
        count, (link, route) = y.shape[1], (self._captured.link, self._route)
        width = sum(last - first for first, last in self._windows)
        if y.stride(1) != 1 or any(number % 2 for number in (width, count, skip, y.stride(0))) or y.data_ptr() % 4:
            raise ProtocolError(
                f"got {count} of {width} columns from {skip} on, to strides {y.stride()} at {y.data_ptr():#x}, "
                "expected an even number of contiguous ones, from an even one on"
            )
        rows = route.token_M if self._by_entry else route.pair_N
        assert rows is not None
        numbers = (int(self._by_entry), y.data_ptr(), 2 * y.stride(0), width, 0, count, skip)
        pointers = [link.state.address, *(tensor.data_ptr() for tensor in (self._seq, route.counts, rows))]
        link.queue.follow_engine()
        if not self._has_waited:
            self.wait()
        link.queue.launch(f"link_add_{self._dtype}", *pointers, *numbers)
        link.queue.lead_engine()


class Captured:
    """A link in CUDA graphs; see this module. `broken`: why it is of no use any more, once `finish` has found that."""

    def __init__(self, link: KernelLink) -> None:
        self.link = link
        self.broken: LoraServerError | None = None

    def site(self, header: RequestHeader, x_TK: torch.Tensor, route: Route, by_entry: bool) -> CapturedSite:
        """Return the launches of a site; each pass leaves what is to be sent in `x_TK` and `route`."""
        return CapturedSite(self, header, x_TK, route, by_entry)

    def take_over(self, newer: KernelLink) -> None:
        """Go on with a newer link, also in what was captured; the present one is closed."""
        newer.state.take_over(self.link.state)
        self.link, self.broken = newer, None

    def begin(self, seconds: float) -> None:
        """Set how long each wait may take, before a pass or the first of many."""
        self.link.state.tell({"budget_ns": round(seconds * 1e9)})

    def finish(self) -> None:
        """Raise the error that a shard answered with, or why the link is broken; call it after each pass."""
        state = self.link.state.read()
        status, seq = LinkStatus(int(state["status"])), int(state["status_seq"])
        if status is LinkStatus.OK:
            return
        if status is not LinkStatus.FAILED:
            self.broken = self.link.failure(status, seq)
            raise self.broken
        self.link.state.tell({"status": LinkStatus.OK})
        raise _refusal(self.link, seq)

    def pushed(self) -> int:
        """Count the steps that kernels have put on this link."""
        return int(self.link.state.read()["pushed"])

    def last(self) -> RequestHeader:
        """Return the header of the newest of them, as it was put."""
        return self.link.sent(self.pushed())


def _refusal(link: KernelLink, seq: int) -> LoraServerError:
    memory = link.gpu.read(link.memory.response_at(seq), 2 * slot.HEADER_BYTES)
    header = ResponseHeader.unpack_from(memoryview(bytearray(memory)))
    code, _, message = memory[slot.HEADER_BYTES :][: header.payload_bytes].decode(errors="replace").partition("\n")
    return rebuild(code, message)
