"""A link's state block in GPU memory, and a host's wait for a kernel that waits for an answer."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch

from lora_server.device.protocol.codes import LinkStatus
from lora_server.device.protocol.gpu import Gpu, Queue
from lora_server.device.protocol.layout import CLIENT

LATE_SECONDS = 1.0  # after its budget, for the kernel that waits to end
SPIN_SECONDS, LOOK_SECONDS = 100e-6, 20e-6


class LinkState:
    """The words by which kernels know a link (client.cuh): where memory is, how far it has come, how long to wait.

    Kernels in CUDA graphs have its address alone, so that they outlive a link: see `take_over`.
    """

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._block = torch.zeros(CLIENT.itemsize, dtype=torch.uint8, device=gpu.device)
        self._words: dict[str, int] = {}
        self._led: dict[str, int] = {}

    @property
    def address(self) -> int:
        """The block's address."""
        return self._block.data_ptr()

    def address_of(self, word: str) -> int:
        """Return the address of one of its words."""
        assert CLIENT.fields is not None
        return self.address + CLIENT.fields[word][1]

    def write(self, words: Mapping[str, int]) -> None:
        """Write the words of a link that has pushed no step."""
        self._words, block = dict(words), np.zeros(1, CLIENT)
        for name, value in (self._words | self._led).items():
            block[name] = value
        self._gpu.settle()  # zeros that torch made
        self._gpu.write(self.address, block.tobytes())

    def tell(self, words: Mapping[str, int]) -> None:
        """Change words that running kernels may read."""
        self._gpu.write_words({self.address_of(name): value for name, value in words.items()})

    def read(self) -> Any:
        """Return the block as it is now, as CLIENT."""
        return np.frombuffer(self._gpu.read(self.address, CLIENT.itemsize), CLIENT)[0]

    def be_led(self, live: torch.Tensor, failed: torch.Tensor) -> None:
        """Keep words of each pass in leader mode, int32 and int64 [1] (client.cuh); before anything is captured."""
        self._led = {"live": live.data_ptr(), "failed": failed.data_ptr()}
        self.tell(self._led)

    def take_over(self, older: LinkState) -> None:
        """Use the block of an older link, which is closed: what was captured with it goes on here, at step 1."""
        self._block, self._led = older._block, older._led
        self.write(self._words)


class AnswerWait:
    """A host's wait for answers. A kernel of the link's queue waits; this watches it, and can end it."""

    def __init__(self, gpu: Gpu, state: LinkState, is_served: Callable[[], bool]) -> None:
        """Pins a page of host memory until `close`. Raises ConfigError."""
        self._state, self._is_served = state, is_served
        self._page = memoryview(mmap.mmap(-1, mmap.PAGESIZE))  # the state, after each wait; then the abort word
        self._abort = np.frombuffer(self._page, np.uint64, 1, CLIENT.itemsize)
        address, self.close = gpu.pin(self._page)
        self.abort_address = address + CLIENT.itemsize

    def look(self) -> None:
        """End kernels that wait for a shard that is gone."""
        if not self._is_served():
            self.abort()

    def abort(self) -> None:
        """End every kernel that waits."""
        self._abort[0] = 1

    def wait(self, queue: Queue, seq: int, deadline: float, fetch: Iterable[tuple[memoryview, int]]) -> LinkStatus:
        """Wait for the answer to a step; then copy to host memory, each part from its address.

        Returns TIMEOUT also where the kernel does not end LATE_SECONDS after the deadline.
        """
        budget_ns = max(0, round((deadline - time.monotonic()) * 1e9))
        self._abort[0] = 0
        self._state.tell({"pushed": seq, "budget_ns": budget_ns, "status": LinkStatus.OK})
        queue.launch("link_wait", self._state.address, self._state.address_of("pushed"))
        for memory, address in ((self._page[: CLIENT.itemsize], self._state.address), *fetch):
            queue.fetch(memory, address)
        if not self._becomes_idle(queue, deadline + LATE_SECONDS):
            return LinkStatus.TIMEOUT
        return LinkStatus(int(np.frombuffer(self._page, CLIENT, 1)["status"][0]))

    def _becomes_idle(self, queue: Queue, deadline: float) -> bool:
        began = time.monotonic()
        while not queue.is_idle():
            now = time.monotonic()
            if now - began < SPIN_SECONDS:
                continue
            self.look()
            if now > deadline:
                self.abort()
                return False
            time.sleep(LOOK_SECONDS)
        return True
