"""A real GPU: memory by CUDA's virtual memory management, kernels by NVRTC, queues that are streams.

CuPy compiles at run time, without nvcc, and caches what came out on disk, under a hash of source, options and compiler,
by an atomic rename.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections.abc import Callable, Mapping
from functools import cache
from typing import Protocol, TypeVar

import structlog
import torch
from typing_extensions import override

from kernels_cuda.cuda import on_device
from lora_server.device.protocol.cuda_kernels import DeviceKernels, Load, compiled
from lora_server.device.protocol.gpu import Gpu, Memory, Queue, Shared
from lora_server.device.protocol.needs import check
from lora_server.device.protocol.pinned import Pinned
from lora_server.device.protocol.virtual_memory import Exported, Imported, call, driver
from lora_server.errors import ConfigError, ShardUnavailableError
from lora_server.transport.environment import prepare_environment

HIGHEST = -100  # of a stream's priorities: lower than any GPU has, and the driver takes the nearest
WRITE_SECONDS = 0.05  # for a word, while a kernel that serves runs
MOST_STREAMS = 8  # to try, of CUDA's 32 connections
log = structlog.get_logger()


class Stream(Protocol):
    """A CUDA stream, as `unblocked` uses it."""

    def query(self) -> bool:
        """Whether all its work is done."""


S = TypeVar("S", bound=Stream)


def unblocked(stream: S, take: Callable[[], S], write: Callable[[S], None], seconds: float) -> S:
    """Return the first stream, `stream` or one that `take` gives, on which a write ends within `seconds`.

    A stream may share its connection with the kernel that serves, and then waits for its end. After MOST_STREAMS the
    last one is returned: its writes are late, not lost.
    """
    for tried in range(1, MOST_STREAMS + 1):
        write(stream)
        deadline = time.monotonic() + seconds
        while not (done := stream.query()) and time.monotonic() < deadline:
            time.sleep(seconds / 100)
        if done:
            return stream
        log.warning("a write waits for the kernel that serves", streams_tried=tried, waited_seconds=seconds)
        if tried < MOST_STREAMS:
            stream = take()
    log.error("every write waits for the kernel that serves to be idle; expect slow joins", streams_tried=tried)
    return stream


class CudaQueue(Queue):
    """A stream of its own."""

    def __init__(self, gpu: CudaGpu, urgent: bool) -> None:
        self._gpu, self._urgent, self._closed = gpu, urgent, False
        self._stream = gpu.streams.take(urgent)

    @override
    def follow_engine(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._gpu.device))

    @override
    def lead_engine(self) -> None:
        torch.cuda.current_stream(self._gpu.device).wait_stream(self._stream)

    @override
    def keep(self, *tensors: torch.Tensor | None) -> None:
        for tensor in tensors:
            if tensor is not None:
                tensor.record_stream(self._stream)

    @override
    def launch(self, kernel: str, *values: int) -> None:
        with torch.cuda.stream(self._stream):
            self._gpu.functions.launch(kernel, values)

    @override
    def send(self, address: int, data: memoryview) -> None:
        call("cuMemcpyHtoDAsync", address, _address(data), data.nbytes, self._stream.cuda_stream)

    @override
    def fetch(self, data: memoryview, address: int) -> None:
        call("cuMemcpyDtoHAsync", _address(data), address, data.nbytes, self._stream.cuda_stream)

    @override
    def is_idle(self) -> bool:
        return bool(self._stream.query())

    @override
    def close(self) -> None:
        with contextlib.suppress(RuntimeError):  # a GPU that is lost has ended it all
            self._stream.synchronize()
        if not self._closed:
            self._closed = True
            self._gpu.streams.give(self._urgent, self._stream)


class _Streams:
    """The streams of a GPU. torch has 32 for each priority, and returns the first one again to the 33rd caller: what is
    queued after a kernel that serves would wait for ever. None is destroyed: torch remembers where memory was used."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._spare: dict[bool, list[torch.cuda.ExternalStream]] = {False: [], True: []}

    def take(self, urgent: bool) -> torch.cuda.ExternalStream:
        """Return an idle stream."""
        with contextlib.suppress(IndexError):
            return self._spare[urgent].pop()
        with on_device(self._device):
            flags = int(driver().CUstream_flags.CU_STREAM_NON_BLOCKING)
            pointer = int(call("cuStreamCreateWithPriority", flags, HIGHEST if urgent else 0))
            return torch.cuda.ExternalStream(pointer, device=self._device)

    def give(self, urgent: bool, stream: torch.cuda.ExternalStream) -> None:
        """Take back a stream that has no work left."""
        self._spare[urgent].append(stream)


def _address(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


class CudaGpu(Gpu):
    """See Gpu. The caller's thread needs no context: it gets the device's."""

    def __init__(self, device: torch.device, multiprocessors: int | None = None, load: Load = compiled) -> None:
        """See DeviceKernels."""
        self.device = device
        self.functions = DeviceKernels(device, self.kernels, multiprocessors, load)
        self._lock = threading.Lock()
        self.streams = _Streams(device)
        self._writes = self.streams.take(urgent=False)
        self._word = torch.zeros(1, dtype=torch.int64, device=device)

    @override
    def compile(self, source: str) -> None:
        self.functions.compile(source)

    @override
    def settle(self) -> None:
        torch.cuda.current_stream(self.device).synchronize()

    @override
    def create(self, nbytes: int) -> Shared:
        with on_device(self.device):
            try:
                return Exported(nbytes, self.device)
            except (RuntimeError, ImportError) as error:
                raise ShardUnavailableError(
                    f"{self.device}: cannot share {nbytes} bytes for a link ({error}); start the server with a smaller "
                    "--device-pool, --max-step-rows or --slots"
                ) from error

    @override
    def map(self, fd: int, nbytes: int) -> Memory:
        with on_device(self.device):
            try:
                return Imported(fd, nbytes, self.device)
            except (RuntimeError, ImportError) as error:
                raise ConfigError(
                    f"transport gpu: {self.device} cannot map the other end's GPU memory ({error}); is its GPU visible "
                    "to this process? transport='shm' works without"
                ) from error

    @override
    def pin(self, memory: memoryview) -> tuple[int, Callable[[], None]]:
        pinned = Pinned(memory, [(0, memory.nbytes)], self.device)
        return pinned.pointer(0), pinned.close

    @override
    def queue(self, urgent: bool = False) -> Queue:
        return CudaQueue(self, urgent)

    @override
    def write(self, address: int, data: bytes) -> None:
        with self._lock, on_device(self.device):
            call("cuMemcpyHtoDAsync", address, data, len(data), self._writes.cuda_stream)
            self._writes.synchronize()

    @override
    def write_word(self, address: int, value: int) -> None:
        self.write_words({address: value})

    @override
    def write_words(self, words: Mapping[int, int]) -> None:
        """Wait once for all: where processes share a GPU without MPS, a wait may take the others' time slices."""
        with self._lock, on_device(self.device):
            for address, value in words.items():
                call("cuStreamWriteValue64", self._writes.cuda_stream, address, value, 0)
            self._writes.synchronize()

    @override
    def try_writes(self) -> None:
        address, take = self._word.data_ptr(), lambda: self.streams.take(urgent=False)
        with self._lock, on_device(self.device):
            self._writes = unblocked(
                self._writes,
                take,
                lambda stream: call("cuStreamWriteValue64", stream.cuda_stream, address, 0, 0),
                WRITE_SECONDS,
            )

    @override
    def read(self, address: int, nbytes: int) -> bytes:
        data = bytearray(nbytes)
        with self._lock, on_device(self.device):
            call("cuMemcpyDtoHAsync", _address(memoryview(data)), address, nbytes, self._writes.cuda_stream)
            self._writes.synchronize()
        return bytes(data)


@cache
def _open(device: torch.device) -> CudaGpu:
    check(device)
    return CudaGpu(device)


def open_cuda(device: torch.device) -> Gpu:
    """Return the device's one GPU of this process. Raises ConfigError that names what is missing, and its cure."""
    prepare_environment()
    index = torch.cuda.current_device() if device.index is None else device.index
    return _open(torch.device("cuda", index))
