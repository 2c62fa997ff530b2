"""NVSHMEM's world of GPUs that are this CPU: the PEs' heaps lie side by side in a file that all processes map.

As NVSHMEM does, `enter` waits for all, however long that takes. NETWORK=1 in the environment: nothing of another PE is
mapped, and only puts go there.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
import time
from pathlib import Path

import torch

from lora_server.device.nvshmem import opened
from lora_server.device.nvshmem.world import UID_BYTES, WorldGpu
from lora_server.device.protocol import source
from lora_server.device.protocol.gpu import Memory, Queue
from lora_server.transport.mapping import Mapping
from tests.support.gpu.emulated_gpu import EmulatedGpu, EmulatedQueue, library

NETWORK = "LORA_SERVER_TEST_NETWORK"
LINE = 128  # each PE has one behind the heaps, where it says that it is there


class Heap(Memory):
    def __init__(self, mapping: Mapping, rank: int, nbytes: int) -> None:
        self.mapping = mapping
        self.tensor = torch.frombuffer(mapping.view[rank * nbytes : (rank + 1) * nbytes], dtype=torch.uint8)
        self.address = self.tensor.data_ptr()

    def close(self) -> None:
        """Do nothing: the heap stays mapped."""


class EmulatedWorldGpu(EmulatedGpu, WorldGpu):
    def __init__(self) -> None:
        super().__init__()
        self._heap: Heap | None = None
        self._libraries: list[ctypes.CDLL] = []  # that know PEs
        self._rank = self._nbytes = 0
        self.network = os.environ.get(NETWORK) == "1"

    def compile(self, source_name: str) -> None:
        compiled, _ = library(source_name, source_name in source.SOURCES)
        if source_name in source.SOURCES:
            self._libraries.append(compiled)
            self._tell(compiled)

    def _tell(self, compiled: ctypes.CDLL) -> None:
        """Tell a library's kernels where the heaps are, once that is known."""
        if self._heap is not None:
            own = ctypes.c_void_p(self._heap.address)
            compiled.live_world(self._rank, own, ctypes.c_uint64(self._nbytes), int(self.network))

    def queue(self, urgent: bool = False) -> Queue:
        return EmulatedQueue(nvshmem=True)

    def new_uid(self) -> bytes:
        return os.urandom(UID_BYTES)

    def enter(self, rank: int, size: int, uid: bytes, nbytes: int) -> Memory:
        path = Path(tempfile.gettempdir()) / f"lora-world-{uid.hex()[:32]}"
        fd, total = os.open(path, os.O_RDWR | os.O_CREAT, 0o600), size * (nbytes + LINE)
        try:
            os.ftruncate(fd, total)
            mapping = Mapping(total, fd)
        finally:
            os.close(fd)
        here = mapping.view[size * nbytes :]
        here[rank * LINE] = 1
        while not all(here[pe * LINE] for pe in range(size)):
            time.sleep(1e-3)
        path.unlink(missing_ok=True)
        self._heap, self._rank, self._nbytes = Heap(mapping, rank, nbytes), rank, nbytes
        for compiled in self._libraries:
            self._tell(compiled)
        return self._heap

    def peer(self, address: int, pe: int) -> int:
        assert self._heap is not None and self._heap.address <= address < self._heap.address + self._nbytes
        return 0 if self.network and pe != self._rank else address + (pe - self._rank) * self._nbytes


def use() -> EmulatedWorldGpu:
    """Engines on this process's CPU have it as their GPU in a world."""
    one = EmulatedWorldGpu()
    opened.world_openers["cpu"] = lambda device: one
    return one
