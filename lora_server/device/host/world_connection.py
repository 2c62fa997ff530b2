"""A shard's end of a link in NVSHMEM's world: it knows every place beforehand, from the client's grant."""

from __future__ import annotations

import threading

from typing_extensions import override

from lora_server.device.nvshmem.world import World
from lora_server.transport.base import Connection, Grant
from lora_server.wire.region import PAGE_BYTES, Region, RegionLayout


class WorldConnection(Connection):
    """A shard's end. Nobody but the kernel takes its steps; `given_up`: the kernel uses it no more."""

    transport = "nvshmem"

    def __init__(self, grant: Grant, world: World) -> None:
        self.client, self.epoch, self._world, self._pe = grant.client, grant.epoch, world, grant.pe
        layout = RegionLayout(1, PAGE_BYTES, PAGE_BYTES)
        self.region = Region(memoryview(bytearray(layout.nbytes)), layout)  # nobody writes there: the host sees no step
        self.given_up = threading.Event()

    def words(self) -> dict[str, int]:
        """For CONNECT: see layout.LINK."""
        heap, shard = self._world.heap, int(self._world.place.rank)
        own = {"epoch": self.epoch, "client": self.client, "depth": heap.sizes.depth}
        own |= {"request_bytes": heap.sizes.request, "response_bytes": heap.sizes.response}
        return own | self._world.words(self._pe - heap.shards, shard, self._pe)

    @override
    def respond(self, seq: int, nbytes: int) -> None:
        """The kernel does."""
