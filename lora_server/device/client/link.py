"""An engine on a GPU and a shard whose kernel serves by itself, on one host: slots lie in GPU memory at both ends.

The link's *state block* says where they are, how far it has come, and how long to wait; kernels in CUDA graphs know
nothing but its address, so that they outlive a link: see `take_over`. Used through Link, a step is put by put.cu as any
device's, the answer is awaited by a kernel, and a host that asks gets its header. Used by `captured` no host is asked.
KernelLink is that, wherever the other end is; GpuLink shares memory with a shard of this host, world_link has the rest.
"""

from __future__ import annotations

import mmap
import time
from abc import abstractmethod
from collections.abc import Callable

import numpy as np
import torch
from typing_extensions import override

from kernels_cuda import routing
from kernels_cuda.routing import Choice
from lora_server.device.client.device_link import DeviceLink, DeviceSteps
from lora_server.device.client.put import Put
from lora_server.device.protocol.codes import LinkStatus
from lora_server.device.protocol.gpu import Gpu, Memory, Shared
from lora_server.device.protocol.layout import CLIENT
from lora_server.device.protocol.slots import GpuRows, SlotSizes, check_activations
from lora_server.errors import ConfigError, LoraServerError, ProtocolError
from lora_server.wire import slot
from lora_server.wire.messages import Hello, Welcome
from lora_server.wire.slot import RequestHeader

ANSWER_BYTES = 2 * slot.HEADER_BYTES  # the header, and the text of a refusal
LATE_SECONDS = 1.0  # behind its budget, for the kernel that waits to end
assert CLIENT.fields is not None
_PUSHED_AT = CLIENT.fields["pushed"][1]
SPIN_SECONDS, LOOK_SECONDS = 100e-6, 20e-6


class KernelLink(DeviceSteps):
    """The client's end; see Link. Each step is waited for before its slot's next one is pushed."""

    _sizes: SlotSizes
    _requests: Memory | None = None  # as this GPU sees it
    _responses: Memory | None = None

    def _open(self, gpu: Gpu, client: int) -> None:
        """Before the other end is known."""
        self.gpu, self._client = gpu, client
        for source in ("put.cu", "route.cu", "link.cu"):
            gpu.compile(source)
        self.queue = gpu.queue(urgent=True)
        self._unpins: list[Callable[[], None]] = []
        self._waited = 0
        self._led: dict[str, int] = {}
        self.state = torch.zeros(CLIENT.itemsize, dtype=torch.uint8, device=gpu.device)
        self._home = memoryview(mmap.mmap(-1, mmap.PAGESIZE))  # of the state, after each wait; then what aborts one
        self._abort = np.frombuffer(self._home, np.uint64, 1, CLIENT.itemsize)
        self._abort_address = self._pin(self._home) + CLIENT.itemsize
        self._begin(gpu.device)

    def _pin(self, memory: memoryview) -> int:
        address, unpin = self.gpu.pin(memory)
        self._unpins.append(unpin)
        return address

    def _pin_region(self) -> None:
        """What `push` sends of it, and `wait` fetches: no rows, which lie on GPUs."""
        layout = self.region.layout
        for begin, end in (*layout.tables(), *layout.answers()):
            self._pin(self.region.memory[begin:end])

    @abstractmethod
    def _words(self) -> dict[str, int]:
        """Return the link's words; see SlotSizes.words."""

    @abstractmethod
    def _is_served(self) -> bool:
        """Whether the shard may still answer."""

    def _write_state(self, state: torch.Tensor) -> None:
        """As if no step had been pushed."""
        block = np.zeros(1, CLIENT)
        for name, value in (self._words() | self._led | {"abort": self._abort_address}).items():
            block[name] = value
        self.gpu.settle()  # zeros that torch made
        self.gpu.write(state.data_ptr(), block.tobytes())

    def take_over(self, older: KernelLink) -> None:
        """What was captured with `older`, which is closed, is this link's from now on, at its first step."""
        self._led = older._led
        self._write_state(older.state)
        self.state = older.state

    def be_led(self, live: torch.Tensor, failed: torch.Tensor) -> None:
        """In leader mode, before anything is captured: words of each pass, int32 and int64 [1]; see client.cuh."""
        self._led = {"live": live.data_ptr(), "failed": failed.data_ptr()}
        self.tell(self._led)

    @property
    def depth(self) -> int:
        """Steps that may be in flight."""
        return self._sizes.depth

    def sent(self, seq: int) -> RequestHeader:
        """Of a step that a kernel put, from the slot."""
        assert self._requests is not None
        memory = self.gpu.read(self._requests.address + self._sizes.request_at(seq), slot.HEADER_BYTES)
        return RequestHeader.unpack_from(memoryview(bytearray(memory)))

    def look(self) -> None:
        """The watchdog's: kernels that wait for a shard that is gone are told to end."""
        if not self._is_served():
            self._abort[0] = 1

    def response_address(self, seq: int) -> int:
        """Where the answer to a step lies."""
        assert self._responses is not None
        return self._responses.address + self._sizes.response_at(seq)

    # -- a step, as a host pushes it

    @override
    def put_rows(self, header: RequestHeader, x_TK: torch.Tensor, rows_M: torch.Tensor) -> None:
        check_activations(header, x_TK)
        super().put_rows(header, x_TK, rows_M)

    @override
    def put_routed(self, header: RequestHeader, x_TK: torch.Tensor, choice: Choice, by_entry: bool) -> None:
        check_activations(header, x_TK)
        super().put_routed(header, x_TK, choice, by_entry)

    @override
    def _moved(self, rows_M: torch.Tensor) -> torch.Tensor:
        if self.device.type != "cuda":
            return rows_M
        return rows_M.pin_memory().to(self.device, non_blocking=True)

    @override
    def _address(self, seq: int | None) -> int:
        assert self._requests is not None
        return self._requests.address + (0 if seq is None else self._sizes.request_at(seq))

    @override
    def push(self, seq: int, nbytes: int) -> None:
        """Tables first, in the same queue; without rows the kernel only signals."""
        self.queue.follow_engine()
        put = self._waiting[0] if self._waiting else None
        routed = put is not None and put.route is not None
        tables = slot.HEADER_BYTES if routed else nbytes - (0 if put is None else put.sent_bytes)
        self.queue.send(self._address(seq), self.region.request(seq)[:tables])
        super().push(seq, nbytes)

    @override
    def _launch(self, step: Put, choice: Choice | None) -> None:
        if choice is not None:
            assert step.route is not None
            self.queue.launch("route", *routing.arguments(choice, step.route))
        self.queue.launch(step.kernel, *step.arguments())
        self.queue.keep(step.x, step.rows_M, *(choice.tensors if choice is not None else ()))

    @override
    def wait(self, seq: int, deadline: float) -> None:
        """By a kernel, which ends at the deadline, or when the shard is gone; the headers come home behind it."""
        assert self._requests is not None and self._responses is not None
        budget_ns = max(0, round((deadline - time.monotonic()) * 1e9))
        self._abort[0] = 0
        self.tell({"pushed": seq, "budget_ns": budget_ns, "status": LinkStatus.OK})
        queue, sizes = self.queue, self._sizes
        queue.launch("link_wait", self.state.data_ptr(), self.state.data_ptr() + _PUSHED_AT)
        queue.fetch(self._home[: CLIENT.itemsize], self.state.data_ptr())
        queue.fetch(self.region.request(seq)[: slot.HEADER_BYTES], self._requests.address + sizes.request_at(seq))
        queue.fetch(self.region.response(seq)[:ANSWER_BYTES], self.response_address(seq))
        self._until_idle(seq, deadline + LATE_SECONDS)
        status = LinkStatus(int(np.frombuffer(self._home, CLIENT, 1)["status"][0]))
        if status in (LinkStatus.OK, LinkStatus.FAILED):
            self._waited = max(self._waited, seq)
            return
        raise self.failure(status, seq)

    def failure(self, status: LinkStatus, seq: int) -> LoraServerError:
        """What a status means that is neither OK nor FAILED: the link is broken."""
        return {LinkStatus.TIMEOUT: self._timeout, LinkStatus.ABORTED: self._gone}.get(status, self._broken)(seq)

    def _until_idle(self, seq: int, deadline: float) -> None:
        """The watchdog: a shard that is gone answers nothing."""
        began = time.monotonic()
        while not self.queue.is_idle():
            now = time.monotonic()
            if now - began < SPIN_SECONDS:
                continue
            if not self._is_served():
                self._abort[0] = 1
            if now > deadline:
                self._abort[0] = 1
                raise self._timeout(seq)
            time.sleep(LOOK_SECONDS)

    def _broken(self, seq: int) -> ProtocolError:
        return ProtocolError(
            f"shard {self.shard} seq {seq}: the answer is to another step; the next request joins anew"
        )

    def tell(self, words: dict[str, int]) -> None:
        """Words of the state block, to kernels that run too."""
        assert CLIENT.fields is not None
        at = self.state.data_ptr()
        self.gpu.write_words({at + CLIENT.fields[name][1]: value for name, value in words.items()})

    @override
    def responded(self) -> int:
        return self._waited

    def _end(self) -> None:
        """Once nothing of this process uses the link's memory."""
        self._abort[0] = 1
        self.queue.close()
        while self._unpins:
            self._unpins.pop()()


class GpuLink(KernelLink, DeviceLink):
    """To a shard of this host, whose memory and this end's are handed over as descriptors."""

    transport = "gpu"
    _responses: Shared | None = None

    def __init__(self, address: str, hello: Hello, shard: int, gpu: Gpu) -> None:
        """Raises ConfigError where the shard has no such memory, or it cannot be mapped."""
        self._open(gpu, hello.client)
        super().__init__(address, hello, shard, gpu.device, wants_twin=True, slots=True)

    @override
    def _prepare(self, welcome: Welcome, fd: int) -> bool:
        if welcome.twin != "slots":
            raise ConfigError(
                f"transport gpu: shard {self.shard}: {welcome.why or 'it has no kernel that serves'}; start the server "
                "with --device cuda --gpu-transport gpu, or attach with transport='auto'"
            )
        self._sizes = SlotSizes.of(self.region.layout)
        self._requests = self.gpu.map(fd, self._sizes.requests)
        self._responses = self.gpu.create(self._sizes.responses)
        self._pin_region()
        self.rows = GpuRows(self._requests.tensor, self._responses.tensor, self._sizes)
        self._offers = [self._responses.fd]
        self._write_state(self.state)
        return True

    @override
    def _words(self) -> dict[str, int]:
        assert self._requests is not None and self._responses is not None
        return self._sizes.words(self.epoch, self._client, self._requests.address, self._responses.address)

    @override
    def _is_served(self) -> bool:
        return self._peer_alive()

    @override
    def _ring(self) -> None:
        """The kernel looks by itself."""

    @override
    def close(self) -> None:
        """Unmaps once nothing of this process uses it; the shard keeps what it mapped."""
        self._end()
        for memory in (self._requests, self._responses):
            if memory is not None:
                memory.close()
        super().close()
