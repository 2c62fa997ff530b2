"""A process's place in NVSHMEM's world, and where its links lie in the heap that all PEs have alike.

A GPU of such a world sees memory of the others, where it is mapped, or reaches it by puts. A process enters one world
in its life: NVSHMEM can neither leave one, nor begin another. `entered` knows which that is.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from typing import NamedTuple

import structlog
from typing_extensions import override

from lora_server.device.protocol.gpu import Gpu, Memory
from lora_server.device.protocol.slots import SlotSizes
from lora_server.errors import ShardUnavailableError, WorldError
from lora_server.wire import lora_server_pb2 as pb
from lora_server.wire.region import PAGE_BYTES, RegionLayout

UID_BYTES = 128
ENTER_SECONDS = 120.0  # in which all PEs that were there enter
log = structlog.get_logger()


class WorldGpu(Gpu):
    """A GPU whose kernels reach other PEs. Implementations: device.nvshmem.library; a test has one that is this CPU."""

    kernels = Gpu.kernels | {"link_send": "link.cu"}

    @abstractmethod
    def new_uid(self) -> bytes:
        """For a world that is to be made; its process has rank 0."""

    @abstractmethod
    def enter(self, rank: int, size: int, uid: bytes, nbytes: int) -> Memory:
        """So much of the symmetric heap, zeroed. All PEs call it, once, and it returns when all have."""

    @abstractmethod
    def peer(self, address: int, pe: int) -> int:
        """Where this GPU sees another PE's copy of a place in the heap; 0 where only puts go there."""


class Heap(NamedTuple):
    """The same on all PEs: a place per link, so that no two links of one PE have the same."""

    shards: int
    clients: int
    sizes: SlotSizes

    @property
    def nbytes(self) -> int:
        """A shard has a link to each client, a client one to each shard."""
        return self._places * self._link_bytes

    def at(self, client: int, shard: int) -> int:
        """Where a link's requests begin; its responses lie behind them."""
        return (client + shard) % self._places * self._link_bytes

    @property
    def _places(self) -> int:
        return max(self.shards, self.clients)

    @property
    def _link_bytes(self) -> int:
        return self.sizes.requests + self.sizes.responses


class Part(Memory):
    """Of the heap, or of another PE's; it lives as long as the world."""

    def __init__(self, whole: Memory, offset: int, nbytes: int, address: int = 0) -> None:
        self.address = address or whole.address + offset
        self.tensor = whole.tensor[offset : offset + nbytes]

    @override
    def close(self) -> None:
        """The heap stays."""


class World:
    """That this process is in."""

    def __init__(self, gpu: WorldGpu, place: pb.Place, shards: int, layout: RegionLayout) -> None:
        """Does not enter it."""
        self.gpu, self.place, self.layout = gpu, place, layout
        self.heap = Heap(shards, place.size - shards, SlotSizes.of(layout))
        self._memory: Memory | None = None

    @property
    def client(self) -> int:
        """Its index, of an engine."""
        return int(self.place.rank) - self.heap.shards

    def enter(self, seconds: float = ENTER_SECONDS) -> None:
        """With all others; raises WorldError where one of them does not come: this process cannot be in any then."""
        place, failure = self.place, list[Exception]()

        def enter() -> None:
            try:
                self._memory = self.gpu.enter(place.rank, place.size, place.uid, self.heap.nbytes)
            except Exception as error:  # NVSHMEM's, the driver's, the linker's
                failure.append(error)

        # nothing ends a wait in NVSHMEM, so it is nobody's but this thread's
        thread = threading.Thread(target=enter, name="nvshmem", daemon=True)
        thread.start()
        thread.join(seconds)
        if self._memory is None:
            why = f"{type(failure[0]).__name__}: {failure[0]}" if failure else f"it was not entered in {seconds:g} s"
            raise WorldError(
                f"NVSHMEM: PE {place.rank} of {place.size}, world {place.world}: {why}; start this process anew, and "
                "the server where it does not by itself"
            )
        log.info("NVSHMEM's world entered", world=place.world, pe=place.rank, pes=place.size)

    def requests(self, client: int, shard: int) -> Part:
        """This PE's copy of a link's request signal and slots."""
        return self._part(self.heap.at(client, shard), self.heap.sizes.requests)

    def responses(self, client: int, shard: int) -> Part:
        """This PE's copy of its response signal and slots."""
        return self._part(self.heap.at(client, shard) + self.heap.sizes.requests, self.heap.sizes.responses)

    def _part(self, offset: int, nbytes: int) -> Part:
        if self._memory is None:
            raise ShardUnavailableError("NVSHMEM's world was not entered")
        return Part(self._memory, offset, nbytes)

    def words(self, client: int, shard: int, pe: int) -> dict[str, int]:
        """Of a link's state at either end: addresses in this PE's heap, and whose heap the other end is."""
        requests, responses = self.requests(client, shard).address, self.responses(client, shard).address
        return {
            "request_signal": requests,
            "request_slots": requests + PAGE_BYTES,
            "response_signal": responses,
            "response_slots": responses + PAGE_BYTES,
            "pe": pe,
        }


class _Entered:
    """Thread-safe."""

    def __init__(self) -> None:
        self._world: World | None = None
        self._lock = threading.Lock()

    @property
    def place(self) -> pb.Place:
        """What to ask for when joining; empty before the first world."""
        return pb.Place() if self._world is None else self._world.place

    def enter(self, world: World, seconds: float = ENTER_SECONDS) -> World:
        """It, or the one that this process is in if it is the same. Raises WorldError."""
        with self._lock:
            if self._world is None:
                self._world = world  # also where it fails: there is no second time
                world.enter(seconds)
            elif self._world.place != world.place:
                raise WorldError(
                    f"NVSHMEM: this process was PE {self.place.rank} of world {self.place.world}, and a process is in "
                    f"one world in its life; start it anew to be in world {world.place.world}"
                )
            return self._world


entered = _Entered()
