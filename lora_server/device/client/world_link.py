"""Both ends of a link in NVSHMEM's world: nobody hands anything over, since every place is known beforehand.

A client may use its place from the moment at which the controller granted it, and the shard looks there from then on.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from typing_extensions import override

from lora_server.device.client.link import KernelLink
from lora_server.device.nvshmem.world import Part, World
from lora_server.device.protocol.gpu import Memory
from lora_server.device.protocol.layout import CLIENT
from lora_server.device.protocol.slots import GpuRows
from lora_server.errors import ShardUnavailableError
from lora_server.transport.mapping import Mapping
from lora_server.wire import slot
from lora_server.wire.region import Region


class WorldLink(KernelLink):
    """A client's end. `is_served`: as far as its session knows, which hears of a shard's death by its lease."""

    transport = "nvshmem"

    def __init__(self, world: World, client: int, epoch: int, shard: int, is_served: Callable[[], bool]) -> None:
        self.shard, self.epoch, self._served = shard, epoch, is_served
        self._closed, self._pushed = False, 0
        self._open(world.gpu, client)
        sizes = self._sizes = world.heap.sizes
        own, self._responses = world.link(shard)
        seen = world.gpu.peer(own.address, shard)
        self._is_mapped, self._link_words = bool(seen), world.words(epoch, client, shard)
        self._requests: Memory = Part(own, 0, sizes.requests, seen)
        self._mapping = Mapping(world.layout.nbytes)  # where headers and tables are written, and read
        self.region = Region(self._mapping.view, world.layout)
        self._pin_region()
        self.rows = GpuRows(self._requests.tensor, self._responses.tensor, sizes)
        self._write_state(self.state)

    @override
    def _words(self) -> dict[str, int]:
        return self._link_words

    @override
    def push(self, seq: int, nbytes: int) -> None:
        """Beyond a network it is written here, and then put."""
        super().push(seq, nbytes)
        self._pushed = seq
        if not self._is_mapped:
            self.queue.launch("link_send", self.state.data_ptr(), seq)

    @override
    def _is_served(self) -> bool:
        return self._served()

    @override
    def _gone(self, seq: int) -> ShardUnavailableError:
        return ShardUnavailableError(
            f"shard {self.shard} slot {seq % self.region.layout.depth} seq {seq}: this client's lease is over "
            "(NVSHMEM's world ended, or it was silent for too long); the next request joins anew"
        )

    @override
    def check(self) -> None:
        if not self._served():
            raise self._gone(self.responded() + 1)

    @override
    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._end()
            state = np.frombuffer(self.gpu.read(self.state.data_ptr(), CLIENT.itemsize), CLIENT)[0]
            pushed = max(self._pushed, int(state["pushed"]))  # by hosts, or in CUDA graphs
            word = int.from_bytes(self.gpu.read(int(state["response_signal"]), 8), "little")
            self.unanswered = not self._is_mapped and pushed > slot.signalled_seq(word, self.epoch)
            self._mapping.drop()
