"""The ends of a KernelLink as its client finds them, on this host or in NVSHMEM's world.

`memory` and `words` say where they are; headers and tables are written to `region`, in this process. Unless
`is_mapped`, what is written there for the shard has to be put there by a kernel, too.

On one host each end creates the memory that it reads, and the other maps it by a descriptor. In NVSHMEM's world nothing
is handed over, since every place is known beforehand: a client may use its place once the controller has granted it,
and the shard looks there from then on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import msgspec

from lora_server.device.nvshmem.world import Part, World
from lora_server.device.protocol.gpu import Gpu
from lora_server.device.protocol.slots import LinkMemory, SlotSizes
from lora_server.errors import ConfigError
from lora_server.transport.base import Link
from lora_server.transport.mapping import Mapping
from lora_server.transport.shm import ShmLink
from lora_server.wire.messages import Hello, Welcome
from lora_server.wire.region import Region


def _compile(gpu: Gpu) -> None:
    for source in ("put.cu", "route.cu", "link.cu"):
        gpu.compile(source)


class HostEnds:
    """Ends on this host, with memory that is handed over as descriptors."""

    transport, is_mapped, why_gone = "gpu", True, Link.why_gone

    def __init__(self, address: str, hello: Hello, shard: int, gpu: Gpu) -> None:
        """Raises ConfigError where the shard has no such memory, or it cannot be mapped."""
        _compile(gpu)
        self.shard, self._gpu = shard, gpu
        self._asks = msgspec.structs.replace(hello, device=True, mirror=True, slots=True)
        with contextlib.ExitStack() as undo:
            self._undo = undo
            self._shm = ShmLink(address, self._asks, shard, prepare=self._prepare)
            undo.callback(self._shm.close)
            self._undo = undo.pop_all()

    def _prepare(self, region: Region, welcome: Welcome, fd: int) -> tuple[bool, list[int]]:
        if welcome.mirror != "slots":
            raise ConfigError(
                f"transport gpu: shard {self.shard}: {welcome.why or 'it has no kernel that serves'}; start the server "
                "with --device cuda --gpu-transport gpu, or attach with transport='auto'"
            )
        self.region, sizes = region, SlotSizes.of(region.layout)
        requests = self._gpu.map(fd, sizes.requests)
        self._undo.callback(requests.close)
        responses = self._gpu.create(sizes.responses)
        self._undo.callback(responses.close)
        self.memory = LinkMemory(sizes, requests, responses)
        self.words = sizes.words(self._asks.epoch, self._asks.client, requests.address, responses.address)
        return True, [responses.fd]

    def is_served(self) -> bool:
        """Tell whether the shard's process keeps the connection."""
        return self._shm.is_open()

    def close(self) -> None:
        """Unmap; idempotent."""
        self._undo.close()


class WorldEnds:
    """Ends in NVSHMEM's world."""

    transport = "nvshmem"
    why_gone = "this client's lease is over (NVSHMEM's world ended, or it was silent for too long)"

    def __init__(self, world: World, client: int, epoch: int, shard: int, is_served: Callable[[], bool]) -> None:
        """`is_served`: as far as the client's session knows, which hears of a shard's death by its lease."""
        _compile(world.gpu)
        self.shard, self.is_served, sizes = shard, is_served, world.heap.sizes
        own, responses = world.link(shard)
        seen = world.gpu.peer(own.address, shard)
        self.is_mapped, self.words = bool(seen), world.words(epoch, client, shard)
        self.memory = LinkMemory(sizes, Part(own, 0, sizes.requests, seen), responses)
        self._mapping = Mapping(world.layout.nbytes)
        self.region = Region(self._mapping.view, world.layout)

    def close(self) -> None:
        """Unmap this process's headers and tables; the heap stays. Idempotent."""
        self._mapping.drop()
