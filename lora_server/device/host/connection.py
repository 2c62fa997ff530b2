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
from lora_server.device.protocol.slots import GpuRows, SlotSizes
from lora_server.errors import ConfigError, ProtocolError
from lora_server.transport.base import Grant, Mirror
from lora_server.transport.bells import Bell
from lora_server.transport.rows import Rows
from lora_server.transport.shm import ShmConnection
from lora_server.wire.region import Region, RegionLayout

log = structlog.get_logger()


class GpuConnection(ShmConnection):
    """A connection with steps that the kernel takes. `given_up`: the kernel uses it no more, says its host."""

    transport = "gpu"

    def __init__(
        self, grant: Grant, region: Region, sock: socket.socket, bell: Bell, words: dict[str, int], rows: Rows
    ) -> None:
        """`words`: CONNECT's; see layout.LINK."""
        super().__init__(grant, region, sock, bell)
        self.words, self.rows = words, rows
        self.given_up = threading.Event()

    @override
    def requested(self) -> int:
        """Return 0: the host sees no step."""
        return 0


class GpuMirror:
    """Slots for one client; see base.Mirror and shm.MirrorSlots. Freed when the kernel has given them up."""

    kind: Literal["fd", "ipc", "slots"] = "slots"
    handle = b""
    rows: Rows  # not read on this host

    def __init__(self, gpu: Gpu, layout: RegionLayout) -> None:
        self._gpu, self._sizes = gpu, SlotSizes.of(layout)
        self._requests = gpu.create(self._sizes.requests)
        self._responses: Memory | None = None
        self._connection: GpuConnection | None = None
        self.fd = self._requests.fd

    def connect(self, grant: Grant, region: Region, sock: socket.socket, bell: Bell, fd: int) -> GpuConnection:
        """Map the client's memory for answers. Raises ProtocolError without a descriptor; ConfigError."""
        if fd < 0:
            raise ProtocolError(f"client {grant.client}: got no memory for answers, expected its descriptor")
        self._check_size(fd)
        self._responses = self._gpu.map(fd, self._sizes.responses)
        words = self._sizes.words(grant.epoch, grant.client, self._requests.address, self._responses.address)
        rows = GpuRows(self._requests.tensor, self._responses.tensor, self._sizes)
        self._connection = GpuConnection(grant, region, sock, bell, words, rows)
        return self._connection

    def _check_size(self, fd: int) -> None:
        """Refuse a plain file that is too short; memory of a GPU tells no size, and cannot be shorter."""
        size = os.fstat(fd).st_size
        if 0 < size < self._sizes.responses:
            raise ConfigError(f"got {size} bytes for answers, expected {self._sizes.responses}")

    def free(self) -> bool:
        """Free the slots unless the kernel may still use them; return whether it could."""
        if self._connection is not None and not self._connection.given_up.is_set():
            return False
        try:
            for memory in (self._requests, self._responses):
                if memory is not None:
                    memory.close()
        except RuntimeError as error:  # the GPU is lost to this process, and its kernel's watch ends it
            log.error("a client's GPU memory cannot be unmapped", reason=str(error))
        return True


class SlotsMemory:
    """The slots of a shard that a kernel serves, for its clients; see base.DeviceMemory."""

    slots: ClassVar[bool] = True

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu

    def mirror(self, layout: RegionLayout, pid: int) -> Mirror:
        """Create a client's slots. Raises ShardUnavailableError without room, or if memory cannot be shared."""
        return GpuMirror(self._gpu, layout)

    def pin(self, memory: memoryview) -> Callable[[], None]:
        """Do nothing: a Carrier pins the region itself."""
        return lambda: None
