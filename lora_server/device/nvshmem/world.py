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
from lora_server.wire.region import RegionLayout

UID_BYTES = 128
ENTER_SECONDS = 120.0  # in which all PEs that were there enter
log = structlog.get_logger()


class WorldGpu(Gpu):
    """A GPU with kernels that reach other PEs. See device.nvshmem.library; a test has one that is this CPU."""

    kernels = Gpu.kernels | {"link_send": "link.cu"}

    @abstractmethod
    def new_uid(self) -> bytes:
        """Return the unique id of a new world; the caller's process has rank 0 in it."""

    @abstractmethod
    def enter(self, rank: int, size: int, uid: bytes, nbytes: int) -> Memory:
        """Enter the world; return `nbytes` of its heap, zeroed. All PEs call it once; it returns when all have."""

    @abstractmethod
    def peer(self, address: int, pe: int) -> int:
        """Return where this GPU sees another PE's copy of a place in the heap; 0 if only puts reach it."""


class Heap(NamedTuple):
    """A plan of the heap, the same on all PEs: a place per link, so that no two links of one PE share one."""

    shards: int
    clients: int
    sizes: SlotSizes

    @property
    def nbytes(self) -> int:
        """Bytes of one PE's heap: a shard has a link to each client, a client one to each shard."""
        return self._places * self._link_bytes

    def at(self, client: int, shard: int) -> int:
        """Return the offset of a link's requests; its responses lie behind them."""
        return (client + shard) % self._places * self._link_bytes

    @property
    def _places(self) -> int:
        return max(self.shards, self.clients)

    @property
    def _link_bytes(self) -> int:
        return self.sizes.requests + self.sizes.responses


class Part(Memory):
    """A part of this PE's heap, or of another's; it lives as long as the world."""

    def __init__(self, whole: Memory, offset: int, nbytes: int, address: int = 0) -> None:
        self.address = address or whole.address + offset
        self.tensor = whole.tensor[offset : offset + nbytes]

    @override
    def close(self) -> None:
        """Do nothing: the heap stays."""


class World:
    """The world that this process is in, or is to enter."""

    def __init__(self, gpu: WorldGpu, place: pb.Place, shards: int, layout: RegionLayout) -> None:
        """Lay out the heap. Does not enter the world."""
        self.gpu, self.place, self.layout = gpu, place, layout
        self.heap = Heap(shards, place.size - shards, SlotSizes.of(layout))
        self._memory: Memory | None = None

    def enter(self, seconds: float = ENTER_SECONDS) -> None:
        """Enter with all other PEs. Raises WorldError if one of them does not: no second try is possible here."""
        place, failure = self.place, list[Exception]()

        def enter() -> None:
            try:
                self._memory = self.gpu.enter(place.rank, place.size, place.uid, self.heap.nbytes)
            except Exception as error:  # NVSHMEM's, the driver's, the linker's
                failure.append(error)

        # nothing ends a wait in NVSHMEM: it must not be the caller's
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

    def link(self, pe: int) -> tuple[Part, Part]:
        """Return this PE's copies of the memory of its link to another PE: for requests, and for responses."""
        if self._memory is None:
            raise ShardUnavailableError("NVSHMEM's world was not entered")
        heap, (shard, client) = self.heap, sorted((int(self.place.rank), pe))
        at = heap.at(client - heap.shards, shard)
        requests = Part(self._memory, at, heap.sizes.requests)
        return requests, Part(self._memory, at + heap.sizes.requests, heap.sizes.responses)

    def words(self, epoch: int, client: int, pe: int) -> dict[str, int]:
        """Return the words of this PE's link to another; see SlotSizes.words."""
        requests, responses = self.link(pe)
        return self.heap.sizes.words(epoch, client, requests.address, responses.address, pe)


class _Entered:
    """The world of this process. Thread-safe."""

    def __init__(self) -> None:
        self._world: World | None = None
        self._lock = threading.Lock()

    @property
    def place(self) -> pb.Place:
        """The place to ask for when joining; empty before the first world."""
        return pb.Place() if self._world is None else self._world.place

    def enter(self, world: World, seconds: float = ENTER_SECONDS) -> World:
        """Enter the world and return it; return the one entered before if its place is the same. Raises WorldError."""
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
