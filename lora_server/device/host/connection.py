"""A shard's end of links that its kernel serves: slots in its GPU's memory, answers in the client's."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from typing import ClassVar, Literal

import structlog
from typing_extensions import override

from lora_server.device.protocol.gpu import Gpu, Memory
from lora_server.device.protocol.layout import HERE
from lora_server.device.protocol.slots import GpuRows, SlotSizes
from lora_server.errors import ConfigError, ProtocolError
from lora_server.transport.base import Grant, Twin
from lora_server.transport.bells import Bell
from lora_server.transport.rows import Rows
from lora_server.transport.shm import ShmConnection
from lora_server.wire.region import PAGE_BYTES, Region, RegionLayout

log = structlog.get_logger()


class GpuConnection(ShmConnection):
    """Nobody but the kernel takes its steps. `given_up` is for the pump to call: the kernel uses it no more."""

    transport = "gpu"

    def __init__(
        self,
        grant: Grant,
        region: Region,
        sock: socket.socket,
        bell: Bell,
        requests: Memory,
        responses: Memory,
        sizes: SlotSizes,
    ) -> None:
        super().__init__(grant, region, sock, bell)
        self._requests, self._responses, self._sizes = requests, responses, sizes
        self.given_up = threading.Event()

    def words(self) -> dict[str, int]:
        """For CONNECT: see layout.LINK."""
        sizes = self._sizes
        return {
            "epoch": self.epoch,
            "client": self.client,
            "depth": sizes.depth,
            "request_signal": self._requests.address,
            "request_slots": self._requests.address + PAGE_BYTES,
            "request_bytes": sizes.request,
            "response_signal": self._responses.address,
            "response_slots": self._responses.address + PAGE_BYTES,
            "response_bytes": sizes.response,
            "pe": HERE,
        }

    @property
    @override
    def rows(self) -> Rows:
        return GpuRows(self._requests.tensor, self._responses.tensor, self._sizes)

    @override
    def requested(self) -> int:
        """The host sees no step of it."""
        return 0


class GpuTwin:
    """Slots for one client; see base.Twin and shm.SlotsTwin. Freed when the kernel has given them up."""

    kind: Literal["fd", "ipc", "slots"] = "slots"
    handle = b""
    rows: Rows  # nobody on this host reads them

    def __init__(self, gpu: Gpu, layout: RegionLayout) -> None:
        self._gpu, self._sizes = gpu, SlotSizes.of(layout)
        self._requests = gpu.create(self._sizes.requests)
        self._responses: Memory | None = None
        self._connection: GpuConnection | None = None
        self.fd = self._requests.fd

    def connect(self, grant: Grant, region: Region, sock: socket.socket, bell: Bell, fd: int) -> GpuConnection:
        """With the client's memory for answers; raises ProtocolError without a descriptor, ConfigError."""
        if fd < 0:
            raise ProtocolError(f"client {grant.client}: got no memory for answers, expected its descriptor")
        self._check_size(fd)
        self._responses = self._gpu.map(fd, self._sizes.responses)
        connection = GpuConnection(grant, region, sock, bell, self._requests, self._responses, self._sizes)
        self._connection = connection
        return connection

    def _check_size(self, fd: int) -> None:
        """A descriptor of a plain file says how long it is; one of a GPU's memory does not, and cannot be shorter."""
        size = os.fstat(fd).st_size
        if 0 < size < self._sizes.responses:
            raise ConfigError(f"got {size} bytes for answers, expected {self._sizes.responses}")

    def free(self) -> bool:
        """Whether the kernel uses it no more."""
        if self._connection is not None and not self._connection.given_up.is_set():
            return False
        try:
            for memory in (self._requests, self._responses):
                if memory is not None:
                    memory.close()
        except RuntimeError as error:  # the GPU is lost to this process, whose kernel ends it
            log.error("a client's GPU memory cannot be unmapped", reason=str(error))
        return True


class SlotsMemory:
    """What a shard whose kernel serves has for its clients; see base.DeviceMemory."""

    slots: ClassVar[bool] = True

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu

    def twin(self, layout: RegionLayout, pid: int) -> Twin:
        """Raises ShardUnavailableError where there is no room, or memory cannot be shared."""
        return GpuTwin(self._gpu, layout)

    def pin(self, memory: memoryview) -> Callable[[], None]:
        """Whoever carries steps does that itself: see carrier."""
        return lambda: None
