"""A shard's place in NVSHMEM's world: offers to make the world, enters it, and connects clients with a place in it."""

from __future__ import annotations

import threading
from concurrent.futures import Future

import structlog

from lora_server.device.host.world_connection import WorldConnection
from lora_server.device.nvshmem.world import World, WorldGpu, entered
from lora_server.errors import LeaseError
from lora_server.transport.base import Grant, Port
from lora_server.wire import lora_server_pb2 as pb

log = structlog.get_logger()


class ShardWorld:
    """The one world of this process's life. `ready` resolves when the kernel may be launched, or fails with why not."""

    def __init__(self, gpu: WorldGpu, shard: int, num_shards: int, port: Port) -> None:
        self._gpu, self._num_shards, self._port = gpu, num_shards, port
        self._offer = pb.Place(rank=shard, uid=gpu.new_uid() if shard == 0 else b"")
        self._grants: dict[int, Grant] = {}
        self._lock = threading.Lock()
        self._world: World | None = None
        self.ready: Future[None] = Future()

    @property
    def place(self) -> pb.Place:
        """Return the place to register with: this process's own, or an offer to make the world."""
        return self._offer if self._world is None else self._world.place

    def enter(self, place: pb.Place) -> None:
        """Enter the world in a thread; does nothing the second time."""
        with self._lock:
            if self._world is not None:
                return
            self._world = World(self._gpu, place, self._num_shards, self._port.layout)
        threading.Thread(target=self._enter, args=(self._world,), name="world", daemon=True).start()

    def _enter(self, world: World) -> None:
        try:
            entered.enter(world)
        except Exception as error:  # the process ends, and is started anew
            self.ready.set_exception(error)
            return
        with self._lock:
            grants = list(self._grants.values())
            self.ready.set_result(None)
        for grant in grants:
            self._connect(grant)

    def grant(self, grant: Grant) -> None:
        """Let a client with a place push, now or once the world is entered."""
        if not grant.pe:
            return
        with self._lock:
            self._grants[grant.client] = grant
            if not self.ready.done():
                return
        self._connect(grant)

    def revoke(self, client: int) -> None:
        """Forget a client's grant."""
        with self._lock:
            self._grants.pop(client, None)

    def _connect(self, grant: Grant) -> None:
        assert self._world is not None
        try:
            self._port.connect(WorldConnection(grant, self._world))
        except LeaseError as error:
            log.info("a client left before it was connected", client=grant.client, reason=str(error))
