"""Carries steps of a client without a GPU in reach (shared memory, TCP) to a shard that a kernel serves.

Its steps are copied into slots of the GPU, and the kernel sees one kind of client. Answers it stores straight into
the client's region, which is pinned; their signal is a word of the carrier's, so that the client hears of them last.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable

from lora_server.device.protocol.gpu import Gpu
from lora_server.device.protocol.slots import SIGNAL_BYTES, SlotSizes
from lora_server.transport.base import Connection
from lora_server.wire import slot


class _AnswersWord:
    """A word of host memory, at `address` to the kernel, in which it signals answers."""

    def __init__(self, gpu: Gpu) -> None:
        memory = memoryview(mmap.mmap(-1, mmap.PAGESIZE))
        self._word = memory[:SIGNAL_BYTES].cast("Q")
        self.address, self.close = gpu.pin(memory)

    def newest(self, epoch: int) -> int:
        """Return the newest seq of this epoch that was answered."""
        return slot.signalled_seq(self._word[0], epoch)


class Carrier:
    """The carrier of one connection's steps; used by the shard host's thread."""

    def __init__(self, gpu: Gpu, connection: Connection) -> None:
        self._gpu, self.connection = gpu, connection
        layout = connection.region.layout
        self._sizes = SlotSizes(layout.depth, layout.request_bytes, layout.response_bytes)  # the region's own
        self._slots = gpu.create(self._sizes.requests)
        self._answers = _AnswersWord(gpu)
        self._region_at, self._unpin = gpu.pin(connection.region.memory)
        self._queue, self._sent = gpu.queue(), 0
        self.given_up = threading.Event()

    @property
    def words(self) -> dict[str, int]:
        """Return CONNECT's words; see layout.LINK."""
        answers = self._region_at + self._sizes.depth * self._sizes.request
        grant = self.connection.grant
        words = self._sizes.words(grant.epoch, grant.client, self._slots.address, answers)
        return words | {"response_signal": self._answers.address}

    @property
    def is_wild(self) -> bool:
        """Whether the client signals steps beyond its slots."""
        return self.connection.requested() > self.connection.served + self.connection.region.layout.depth

    @property
    def waits(self) -> bool:
        """Whether a step that was sent is not answered yet."""
        return self._sent > self.connection.served

    def carry(self, respond: Callable[[Connection, int, int], None]) -> None:
        """Send new steps; call `respond` (connection, seq, bytes) for each new answer."""
        while self._sent < self.connection.requested():
            self._sent += 1
            self._send(self._sent)
        while self.connection.served < min(self._answers.newest(self.connection.grant.epoch), self._sent):
            seq = self.connection.served + 1
            respond(self.connection, seq, self._response_bytes(seq))

    def _send(self, seq: int) -> None:
        region = self.connection.region
        memory = region.request(seq)
        nbytes = slot.HEADER_BYTES + slot.payload_bytes(memory)  # the kernel says what is wrong with it
        self._queue.send(self._slots.address + self._sizes.request_at(seq), memory[: min(nbytes, len(memory))])
        while not self._queue.is_idle():  # a copy; the signal goes behind it
            pass
        self._gpu.write_word(self._slots.address, slot.signal(self.connection.grant.epoch, seq))

    def _response_bytes(self, seq: int) -> int:
        memory = self.connection.region.response(seq)
        header = slot.ResponseHeader.unpack_from(memory)
        return min(slot.HEADER_BYTES + header.payload_bytes, len(memory))

    def close(self) -> None:
        """Free the memory, which the kernel uses no more."""
        self._queue.close()
        self._slots.close()
        self._answers.close()
        self._unpin()
