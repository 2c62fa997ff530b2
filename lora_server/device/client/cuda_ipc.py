"""An engine on a GPU and a shard on the same host: the GPU puts each step where the shard finds it.

A put kernel (put.cu), on a stream of its own with the highest priority, stores tables and rows and then the
request signal, with release at system scope; nothing waits for the engine's GEMM, and the host waits for no
stream. Signals, headers and tables lie in the region, which this process pins. Rows and deltas lie in its
twin, memory of the shard's GPU that the client has mapped too (device.host.device_memory), or, where there is
none, in the region as well. A GPU rings no bell: the shard looks at such clients' signals itself.

The host launches on one side, and waits for answers on the other: see Link.
"""

from __future__ import annotations

import contextlib
from typing import Literal

import structlog
import torch
from typing_extensions import override

from kernels_cuda.routing import Choice, router
from lora_server.device.client import put
from lora_server.device.client.device_link import DeviceLink
from lora_server.device.client.imported_twin import ImportedTwin
from lora_server.device.protocol.pinned import Pinned
from lora_server.errors import ConfigError
from lora_server.wire.messages import Hello, Welcome
from lora_server.wire.region import PAGE_BYTES, RegionLayout

HIGHEST = -100  # of a stream's priorities: lower than any GPU has, and torch takes the nearest
log = structlog.get_logger()


class IpcLink(DeviceLink):
    """The client's end; see DeviceLink. `twin`: whether rows must, may or shall not lie in the shard's GPU memory."""

    def __init__(
        self, address: str, hello: Hello, shard: int, device: torch.device, twin: Literal["must", "may", "no"]
    ) -> None:
        """Raises ConfigError without a twin that there must be, or where the region cannot be pinned."""
        self._wanted = twin
        self._imported: ImportedTwin | None = None
        self._pinned: Pinned | None = None
        self._stream = torch.cuda.Stream(device, priority=HIGHEST)
        put.try_out(self._stream, device)
        router(device)  # compiled now, not in the first step
        with torch.cuda.stream(self._stream):  # what it makes is there before the first step is
            super().__init__(address, hello, shard, device, twin != "no")

    @override
    def _prepare(self, welcome: Welcome, fd: int) -> bool:
        if self._wanted != "no":
            try:
                self._imported = ImportedTwin(welcome, fd, self.region.layout, self.device)
            except ConfigError as error:
                if self._wanted == "must":
                    raise
                log.warning("rows go through host memory", shard=self.shard, reason=str(error))
            else:
                self.twin = self._imported.rows
        layout = self.region.layout
        self._pinned = Pinned(self.region.memory, _used_parts(layout, self.twin is not None), self.device)
        self._signal = self._pinned.pointer(0)
        self._slots = [self._pinned.pointer(PAGE_BYTES + i * layout.request_bytes) for i in range(layout.depth)]
        return self.twin is not None

    @override
    def _address(self, seq: int | None) -> int:
        return self._signal if seq is None else self._slots[seq % len(self._slots)]

    @override
    def _moved(self, rows_M: torch.Tensor) -> torch.Tensor:
        return rows_M.pin_memory().to(self.device, non_blocking=True)

    @override
    def _launch(self, step: put.Put, choice: Choice | None) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        for tensor in (step.x, step.rows_M, *(choice.tensors if choice is not None else ())):
            if tensor is not None:
                tensor.record_stream(self._stream)
        if choice is not None:
            assert step.route is not None
            with torch.cuda.stream(self._stream):
                router(self.device).launch(choice, step.route)
        put.launch(step, self._stream)

    @override
    def close(self) -> None:
        """Unmaps after what uses the memory has ended; a GPU that is lost to this process has ended it all."""
        held = [one for one in (self._imported, self._pinned) if one is not None]
        self._imported = self._pinned = None
        if held:
            with contextlib.suppress(RuntimeError):
                torch.cuda.synchronize(self.device)
        for one in held:
            with contextlib.suppress(RuntimeError):
                one.close()
        super().close()


def _used_parts(layout: RegionLayout, twin: bool) -> list[tuple[int, int]]:
    """Return the parts of a region that a GPU accesses: all of it, or with a twin all but the rows."""
    return [(0, PAGE_BYTES), *layout.tables()] if twin else [(0, layout.nbytes)]
