"""A shard's end of a link in NVSHMEM's world: it knows every place beforehand, from the client's grant."""

from __future__ import annotations

import threading

from typing_extensions import override

from lora_server.device.nvshmem.world import World
from lora_server.transport.base import Connection, Grant
from lora_server.wire.region import PAGE_BYTES, Region, RegionLayout


class WorldConnection(Connection):
    """A connection with steps that the kernel takes. `given_up`: the kernel uses it no more, says its host."""

    transport = "nvshmem"

    def __init__(self, grant: Grant, world: World) -> None:
        self.grant = grant
        layout = RegionLayout(1, PAGE_BYTES, PAGE_BYTES)
        self.region = Region(memoryview(bytearray(layout.nbytes)), layout)  # stays as it is: the host sees no step
        self.words = world.words(grant.epoch, grant.client, grant.pe)
        self.given_up = threading.Event()

    @override
    def respond(self, seq: int, nbytes: int) -> None:
        """Do nothing: the kernel responds."""
