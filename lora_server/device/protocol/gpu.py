"""The GPU as the hosts of both ends of a link use it: memory that processes share, kernels, and queues of work.

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
        """Unmap it; idempotent. No kernel of this process may still use it; other processes keep their mappings."""


class Shared(Memory):
    """Memory that this process made, zeroed; `fd` lets another process map it."""

    fd: int


class Queue(ABC):
    """Work that one GPU does in order, beside all other queues. Calls return at once; one thread at a time."""

    @abstractmethod
    def follow_engine(self) -> None:
        """Let what is queued next wait for what torch has queued so far on its current stream."""

    @abstractmethod
    def lead_engine(self) -> None:
        """Let what torch queues next wait for what is here."""

    @abstractmethod
    def keep(self, *tensors: torch.Tensor | None) -> None:
        """Keep torch from reusing their memory before what is here now is done."""

    @abstractmethod
    def launch(self, kernel: str, *values: int) -> None:
        """Launch one of `Gpu.kernels`, with arguments that are all 64 bits wide."""

    @abstractmethod
    def send(self, address: int, data: memoryview) -> None:
        """Copy from pinned host memory, which stays as it is until this is done."""

    @abstractmethod
    def fetch(self, data: memoryview, address: int) -> None:
        """Copy to pinned host memory."""

    @abstractmethod
    def is_idle(self) -> bool:
        """Tell whether all is done. Raises RuntimeError if the GPU failed."""

    @abstractmethod
    def close(self) -> None:
        """Wait until all is done, or the GPU is lost; idempotent."""


class Gpu(ABC):
    """One GPU in one process. Thread-safe, but for its queues."""

    device: torch.device
    kernels: ClassVar[dict[str, str]] = {  # to their sources
        **dict.fromkeys(("put_vectors", "put_halves", "put_e4m3_bfloat16", "put_e4m3_float16"), "put.cu"),
        "route": "route.cu",
        **dict.fromkeys(("link_put_vectors", "link_put_halves"), "link.cu"),
        **dict.fromkeys(("link_put_e4m3_bfloat16", "link_put_e4m3_float16", "link_wait"), "link.cu"),
        **dict.fromkeys(("link_add_bfloat16", "link_add_float16"), "link.cu"),
        **dict.fromkeys(("link_add_e4m3_bfloat16", "link_add_e4m3_float16"), "link.cu"),
        **dict.fromkeys(("serve_bfloat16", "serve_float16"), "serve.cu"),
        **dict.fromkeys(("serve_e4m3_bfloat16", "serve_e4m3_float16"), "serve_e4m3.cu"),
    }

    @abstractmethod
    def compile(self, source: str) -> None:
        """Make a source's kernels ready, which takes seconds where no cache has them."""

    @abstractmethod
    def settle(self) -> None:
        """Wait for what torch has queued on its current stream, which no queue of ours follows by itself."""

    @abstractmethod
    def create(self, nbytes: int) -> Shared:
        """Create memory. Raises ShardUnavailableError without room, or if memory cannot be shared."""

    @abstractmethod
    def map(self, fd: int, nbytes: int) -> Memory:
        """Map another process's `create(nbytes)`, by a descriptor that stays the caller's. Raises ConfigError."""

    @abstractmethod
    def pin(self, memory: memoryview) -> tuple[int, Callable[[], None]]:
        """Let kernels load and store host memory; return its address, and a call that ends that. Raises ConfigError."""

    @abstractmethod
    def queue(self, urgent: bool = False) -> Queue:
        """Return a new queue; `urgent`: its kernels go before others'."""

    @abstractmethod
    def write(self, address: int, data: bytes) -> None:
        """Write memory that running kernels may read; done on return, and seen before any later `write`."""

    @abstractmethod
    def write_word(self, address: int, value: int) -> None:
        """Write 8 aligned bytes, which kernels see all at once; see `write`."""

    def write_words(self, words: Mapping[int, int]) -> None:
        """Write each word at its address, in this order; done on return."""
        for address, value in words.items():
            self.write_word(address, value)

    @abstractmethod
    def try_writes(self) -> None:
        """Find out whether writes wait for the kernel that was just launched, and a way by which they do not."""

    @abstractmethod
    def read(self, address: int, nbytes: int) -> bytes:
        """Return the bytes that lie there now."""
