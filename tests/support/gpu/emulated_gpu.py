"""A GPU that is this CPU, for links that no host touches: memory is a memfd that several processes map, and a kernel
runs in a thread of its queue, from the kernels' own source."""

from __future__ import annotations

import ctypes
import os
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import torch

from kernels_cuda.heuristics import Variant
from lora_server.device.nvshmem.world import WorldGpu
from lora_server.device.protocol import gpu, opened, source
from lora_server.transport.mapping import Mapping
from lora_server.transport.shm import create_memory
from tests.support.gpu import emulated

CPU = torch.device("cpu")
GRID = 2
SERVE = Variant(bulk_copy=True, warps=1)
VARIANTS = dict.fromkeys(source.SOURCES, SERVE) | {"put.cu": Variant(bulk_copy=False, warps=1)}
ROUTE = Variant(bulk_copy=False, warps=2)
STACK_BYTES = 48 << 10
PINNED: list[tuple[int, int]] = []  # (begin, end) of this process's host memory, now
MEMORY = dict.fromkeys(source.SERVES, "ServeMemory") | dict.fromkeys(("put.cu", "route.cu"), "BlockMemory")
MEMORY |= {"link.cu": "LinkMemory"}


@cache
def library(name: str, nvshmem: bool = False) -> tuple[ctypes.CDLL, threading.Lock]:
    """A source's kernels, one at a time; compiled once, shared by processes. `nvshmem`: for its world."""
    own = "struct BlockMemory {};" if name == "link.cu" else ""
    count = f'extern "C" int memory_bytes() {{ return static_cast<int>(sizeof({MEMORY[name]})); }}'
    beyond = f'#define NVSHMEM {int(nvshmem)}\n#include "{name}"\n{own}\n{count}\n'
    live = f"live-{name}"
    return emulated.library(live, VARIANTS.get(name, ROUTE), {live: beyond}), threading.Lock()


def compile_all(nvshmem: bool = False, in_codes: bool = False) -> None:
    """Compile in parallel what shards of one wire and their clients need; with `nvshmem`, also for its world."""
    other, own = source.SERVES[not in_codes], source.SERVES[in_codes]
    with ThreadPoolExecutor() as pool:
        list(pool.map(library, MEMORY.keys() - {other}))
        list(pool.map(library, (own, "link.cu") if nvshmem else (), (True, True)))


class EmulatedMemory(gpu.Shared):
    def __init__(self, nbytes: int, fd: int = -1) -> None:
        if fd < 0:
            self.fd, self._mapping = create_memory("gpu", nbytes)
        else:
            self.fd, self._mapping = -1, Mapping(nbytes, fd)
        self.tensor = torch.frombuffer(self._mapping.view, dtype=torch.uint8)
        self.address = self.tensor.data_ptr()
        self.closed = threading.Event()

    def close(self) -> None:
        if not self.closed.is_set():
            self.closed.set()
            self._mapping.drop()
            if self.fd >= 0:
                os.close(self.fd)


class EmulatedQueue(gpu.Queue):
    """A thread that does one thing after the other. `stop_after`: rounds after which a put goes on no more."""

    stop_after = 0
    stopped = threading.Event()

    def __init__(self, nvshmem: bool = False) -> None:
        self._nvshmem = nvshmem
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._given = self._done = 0
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, daemon=True, name="gpu")
        self._thread.start()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                work()
            except Exception as error:
                self._failure = error
            self._done += 1

    def _give(self, work: Callable[[], None]) -> None:
        self._given += 1
        self._work.put(work)

    def follow_engine(self) -> None:
        """torch computes at once here."""

    def lead_engine(self) -> None:
        while not self.is_idle():
            time.sleep(1e-5)

    def keep(self, *tensors: torch.Tensor | None) -> None:
        self._give(lambda: tensors and None)

    def launch(self, kernel: str, *values: int) -> None:
        name = WorldGpu.kernels[kernel]
        lib, lock = library(name, self._nvshmem and name in source.SOURCES)
        warps = VARIANTS.get(name, ROUTE).warps
        threads = warps * 32 + 32 * (name in source.SERVES)
        blocks = 1 if kernel in ("route", "link_wait", "link_send") else GRID
        pointer, numbers = ctypes.cast(lib[kernel], ctypes.c_void_p), (ctypes.c_int64 * len(values))(*values)
        rounds = self.stop_after if "put" in kernel else 0

        def run() -> None:
            with lock:
                code = lib.run_live(pointer, blocks, threads, lib.memory_bytes(), numbers, len(values), rounds)
            if code == 1:
                self.stopped.set()
                threading.Event().wait()
            assert code == 0, f"{kernel}: {code}"

        self._give(run)

    def send(self, address: int, data: memoryview) -> None:
        _need_pinned(data)
        self._give(lambda: ctypes.memmove(address, _address(data), data.nbytes) and None)

    def fetch(self, data: memoryview, address: int) -> None:
        _need_pinned(data)
        self._give(lambda: ctypes.memmove(_address(data), address, data.nbytes) and None)

    def is_idle(self) -> bool:
        if self._failure is not None:
            raise RuntimeError(str(self._failure))
        return self._done == self._given

    def close(self) -> None:
        self._work.put(None)
        self._thread.join(60)


def _address(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _need_pinned(memory: memoryview) -> None:
    """Raise unless the memory lies within one `pin`, as a real GPU requires for an asynchronous copy."""
    begin = _address(memory)
    if not any(first <= begin and begin + memory.nbytes <= end for first, end in PINNED):
        raise RuntimeError(f"{memory.nbytes} bytes at {begin:#x} are not pinned")


class EmulatedGpu(gpu.Gpu):
    device = CPU

    def compile(self, source: str) -> None:
        library(source)

    def settle(self) -> None:
        """torch computes at once here."""

    def create(self, nbytes: int) -> gpu.Shared:
        return EmulatedMemory(nbytes)

    def map(self, fd: int, nbytes: int) -> gpu.Memory:
        return EmulatedMemory(nbytes, fd)

    def pin(self, memory: memoryview) -> tuple[int, Callable[[], None]]:
        part = (_address(memory), _address(memory) + memory.nbytes)
        PINNED.append(part)
        return part[0], lambda: PINNED.remove(part)

    def queue(self, urgent: bool = False) -> gpu.Queue:
        return EmulatedQueue()

    def write(self, address: int, data: bytes) -> None:
        ctypes.memmove(address, data, len(data))

    def write_word(self, address: int, value: int) -> None:
        ctypes.c_uint64.from_address(address).value = value

    def try_writes(self) -> None:
        """Stores of this CPU wait for no kernel."""

    def read(self, address: int, nbytes: int) -> bytes:
        return ctypes.string_at(address, nbytes)


def use() -> EmulatedGpu:
    """Engines on this process's CPU have it as their GPU."""
    one = EmulatedGpu()
    opened.openers["cpu"] = lambda device: one
    return one
