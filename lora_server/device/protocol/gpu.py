"""A GPU, as the hosts of both ends of a link use it: memory that processes share, kernels, and queues of work.

Implementations: device.protocol.cuda; a test has one that is this CPU. Addresses are those that kernels see.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import ClassVar

import torch


class Memory(ABC):
    """Memory of a GPU; `tensor` is uint8 [nbytes] over it."""

    address: int
    tensor: torch.Tensor

    @abstractmethod
    def close(self) -> None:
        """Unmap it; idempotent. No kernel of this process may still use it; whoever else maps it keeps it."""


class Shared(Memory):
    """Made here, zeroed; `fd` lets another process map it."""

    fd: int


class Queue(ABC):
    """Work that one GPU does in order, beside all other queues. Calls return at once; one thread at a time."""

    @abstractmethod
    def follow_engine(self) -> None:
        """What comes next waits for what torch has queued so far on its current stream."""

    @abstractmethod
    def lead_engine(self) -> None:
        """What torch queues next waits for what is here."""

    @abstractmethod
    def keep(self, *tensors: torch.Tensor | None) -> None:
        """torch gives their memory to nobody else before what is here now is done."""

    @abstractmethod
    def launch(self, kernel: str, *values: int) -> None:
        """One of `Gpu.kernels`, with arguments that are all 64 bits wide."""

    @abstractmethod
    def send(self, address: int, data: memoryview) -> None:
        """From pinned host memory, which stays as it is until this was done."""

    @abstractmethod
    def fetch(self, data: memoryview, address: int) -> None:
        """To pinned host memory."""

    @abstractmethod
    def is_idle(self) -> bool:
        """Whether all is done. Raises RuntimeError where the GPU failed."""

    @abstractmethod
    def close(self) -> None:
        """Wait until all is done, or the GPU is lost; idempotent."""


class Gpu(ABC):
    """One GPU in one process. Thread-safe, but for its queues."""

    device: torch.device
    kernels: ClassVar[dict[str, str]] = {  # to their sources
        "put_vectors": "put.cu",
        "put_halves": "put.cu",
        "put_e4m3_bfloat16": "put.cu",
        "put_e4m3_float16": "put.cu",
        "route": "route.cu",
        "link_put_vectors": "link.cu",
        "link_put_halves": "link.cu",
        "link_put_e4m3_bfloat16": "link.cu",
        "link_put_e4m3_float16": "link.cu",
        "link_wait": "link.cu",
        "link_add_bfloat16": "link.cu",
        "link_add_float16": "link.cu",
        "link_add_e4m3_bfloat16": "link.cu",
        "link_add_e4m3_float16": "link.cu",
        "serve_bfloat16": "serve.cu",
        "serve_float16": "serve.cu",
        "serve_e4m3_bfloat16": "serve_e4m3.cu",
        "serve_e4m3_float16": "serve_e4m3.cu",
    }

    @abstractmethod
    def compile(self, source: str) -> None:
        """Make a source's kernels ready, which takes seconds where no cache has them."""

    @abstractmethod
    def settle(self) -> None:
        """Wait for what torch has queued on its current stream, which no queue of ours follows by itself."""

    @abstractmethod
    def create(self, nbytes: int) -> Shared:
        """Raises ShardUnavailableError where there is no room, or memory cannot be shared."""

    @abstractmethod
    def map(self, fd: int, nbytes: int) -> Memory:
        """Another process's `create(nbytes)`, by a descriptor that stays the caller's. Raises ConfigError."""

    @abstractmethod
    def pin(self, memory: memoryview) -> tuple[int, Callable[[], None]]:
        """Host memory that kernels load and store: where they see it, and how to end that. Raises ConfigError."""

    @abstractmethod
    def queue(self, urgent: bool = False) -> Queue:
        """A new one; `urgent`: its kernels go before others'."""

    @abstractmethod
    def write(self, address: int, data: bytes) -> None:
        """To memory that running kernels may read; done on return, and seen before any later `write`."""

    @abstractmethod
    def write_word(self, address: int, value: int) -> None:
        """The same for 8 aligned bytes, which kernels see at once or not at all."""

    def write_words(self, words: Mapping[int, int]) -> None:
        """Each at its address, in this order; done on return."""
        for address, value in words.items():
            self.write_word(address, value)

    @abstractmethod
    def try_writes(self) -> None:
        """Find out whether writes wait for the kernel that was just launched, and a way by which they do not."""

    @abstractmethod
    def read(self, address: int, nbytes: int) -> bytes:
        """What lies there now."""
