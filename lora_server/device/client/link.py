"""A link of an engine on a GPU to a shard that a kernel serves by itself: slots lie in GPU memory at both ends.

Used through Link, a step is put by put.cu as any device's, the answer is awaited by a kernel, and a host that asks gets
its header. Used by `captured` no host is asked. Where the other end is, is the business of `ends`.
"""

from __future__ import annotations

import contextlib

import torch
from typing_extensions import override

from kernels_cuda import routing
from kernels_cuda.routing import Choice, Route
from lora_server.device.client.ends import HostEnds, WorldEnds
from lora_server.device.client.state import AnswerWait, LinkState
from lora_server.device.client.steps import DeviceSteps
from lora_server.device.protocol.codes import LinkStatus
from lora_server.device.protocol.gpu import Gpu
from lora_server.device.protocol.slots import GpuRows, check_activations
from lora_server.errors import LoraServerError, ProtocolError
from lora_server.transport.base import Link
from lora_server.wire import slot
from lora_server.wire.slot import RequestHeader

ANSWER_BYTES = 2 * slot.HEADER_BYTES  # the header, and the text of a refusal


class KernelLink(Link):
    """The client's end; see Link. Each step is waited for before its slot's next one is pushed."""

    device: torch.device

    def __init__(self, gpu: Gpu, ends: HostEnds | WorldEnds) -> None:
        """Owns `ends`. Raises ConfigError where host memory cannot be pinned."""
        self.gpu, self.device, self._ends = gpu, gpu.device, ends
        self.shard, self.epoch, self.transport = ends.shard, ends.words["epoch"], ends.transport
        self.region, self.memory, self.why_gone = ends.region, ends.memory, ends.why_gone
        self.rows = GpuRows(self.memory.requests.tensor, self.memory.responses.tensor, self.memory.sizes)
        self._pushed = self._waited = 0
        with contextlib.ExitStack() as undo:
            undo.callback(ends.close)
            layout = self.region.layout
            for begin, end in (*layout.tables(), *layout.answers()):  # what `push` sends and `wait` fetches: no rows
                undo.callback(gpu.pin(self.region.memory[begin:end])[1])
            self.state = LinkState(gpu)
            self.answers = AnswerWait(gpu, self.state, ends.is_served)
            undo.callback(self.answers.close)
            self.queue = gpu.queue(urgent=True)
            undo.callback(self.queue.close)
            self.state.write(ends.words | {"abort": self.answers.abort_address})
            slots = [self.memory.request_at(seq) for seq in range(self.memory.sizes.depth)]
            self._steps = DeviceSteps(self.device, self.epoch, slots, self.memory.requests.address)
            self._undo = undo.pop_all()

    def sent(self, seq: int) -> RequestHeader:
        """Read the header of a step that a kernel put, from the slot."""
        memory = self.gpu.read(self.memory.request_at(seq), slot.HEADER_BYTES)
        return RequestHeader.unpack_from(memoryview(bytearray(memory)))

    @override
    def put_rows(self, header: RequestHeader, x_TK: torch.Tensor, rows_M: torch.Tensor) -> None:
        check_activations(header, x_TK)
        self._steps.put_rows(header, x_TK, rows_M)

    @override
    def put_routed(self, header: RequestHeader, x_TK: torch.Tensor, choice: Choice, by_entry: bool) -> None:
        check_activations(header, x_TK)
        self._steps.put_routed(header, x_TK, choice, by_entry)

    @override
    def routed(self, seq: int) -> Route:
        return self._steps.routed(seq)

    @override
    def push(self, seq: int, nbytes: int) -> None:
        """Send the tables, then put the rows and the signal, all in one queue; without rows only signal.

        Beyond a network all of it is written here, and then put.
        """
        queue, (step, choice) = self.queue, self._steps.take(seq)
        queue.follow_engine()
        tables = slot.HEADER_BYTES if step.route is not None else nbytes - step.sent_bytes
        queue.send(step.place.slot, self.region.request(seq)[:tables])
        if choice is not None:
            assert step.route is not None
            queue.launch("route", *routing.arguments(choice, step.route))
        queue.launch(step.kernel, *step.arguments())
        queue.keep(step.x, step.rows_M, *(choice.tensors if choice is not None else ()))
        self._pushed = seq
        if not self._ends.is_mapped:
            queue.launch("link_send", self.state.address, seq)

    @override
    def wait(self, seq: int, deadline: float) -> None:
        """Let a kernel wait, which ends at the deadline, or when the shard is gone; then fetch the headers."""
        request = self.region.request(seq)[: slot.HEADER_BYTES], self.memory.request_at(seq)
        response = self.region.response(seq)[:ANSWER_BYTES], self.memory.response_at(seq)
        status = self.answers.wait(self.queue, seq, deadline, (request, response))
        if status not in (LinkStatus.OK, LinkStatus.FAILED):
            raise self.failure(status, seq)
        self._waited = max(self._waited, seq)

    def failure(self, status: LinkStatus, seq: int) -> LoraServerError:
        """Return the error for a status that is neither OK nor FAILED: the link is broken."""
        if status is LinkStatus.TIMEOUT:
            return self._timeout(seq)
        if status is LinkStatus.ABORTED:
            return self._gone(seq)
        return ProtocolError(
            f"shard {self.shard} seq {seq}: the answer is to another step; the next request joins anew"
        )

    @override
    def responded(self) -> int:
        return self._waited

    @override
    def check(self) -> None:
        if not self._ends.is_served():
            raise self._gone(self.responded() + 1)

    @override
    def close(self) -> None:
        """Free the link's memory once nothing of this process uses it; the shard keeps what it mapped."""
        self.answers.abort()
        self.queue.close()
        if not self._ends.is_mapped:
            state = self.state.read()
            word = int.from_bytes(self.gpu.read(int(state["response_signal"]), 8), "little")
            pushed = max(self._pushed, int(state["pushed"]))  # by hosts, or in CUDA graphs
            self.unanswered = pushed > slot.signalled_seq(word, self.epoch)
        self._undo.close()
