"""A shard's kernel as its host sees it: launched, launched again when it leaves, watched, and stopped.

All that the kernel knows lies in the GPU's memory, so that it may leave after any turn. What cannot happen beside it
(more memory in the place of less) happens in between: see `between`.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import structlog
import torch

from kernels_cuda.launch import DTYPE_NAMES
from lora_server.device.host.arguments import ServeArguments
from lora_server.device.host.mailbox import TAKEN_SECONDS, Mailbox, wait_until
from lora_server.device.protocol.codes import CommandKind
from lora_server.device.protocol.gpu import Gpu
from lora_server.device.protocol.source import SERVES
from lora_server.errors import ShardUnavailableError
from lora_server.spec import ModelSpec
from lora_server.wire import slot
from lora_server.wire.region import RegionLayout

IDLE_NS = 1_000_000_000
HEARTBEAT_SECONDS = 5.0
log = structlog.get_logger()
T = TypeVar("T")


class KernelLostError(Exception):
    """The GPU serves no more in this process: the shard has to end, and is started anew."""


class ServeKernel:
    """The kernel of one shard. One thread calls `look`, all the time; the rest is called from any."""

    def __init__(
        self,
        gpu: Gpu,
        spec: ModelSpec,
        dtype: torch.dtype,
        region: RegionLayout,
        max_step_rows: int,
        idle_ns: int = IDLE_NS,
        heartbeat_seconds: float = HEARTBEAT_SECONDS,
    ) -> None:
        in_codes = region.widest == slot.E4M3
        gpu.compile(SERVES[in_codes])
        self._name = f"serve_{'e4m3_' if in_codes else ''}{DTYPE_NAMES[dtype]}"
        self.gpu, self.mailbox, self._queue = gpu, Mailbox(gpu), gpu.queue()
        self.arguments = ServeArguments(gpu, spec, dtype, region, max_step_rows)
        self.arguments.set(mailbox=self.mailbox.address, idle_ns=idle_ns)
        self.launches = 0
        self._heartbeat = Heartbeat(self.mailbox, heartbeat_seconds)
        self._between: queue.SimpleQueue[tuple[Callable[[], None], Future[None]]] = queue.SimpleQueue()
        self._stopping, self._starting = threading.Event(), threading.Lock()

    def reserve_rank(self, max_rank: int) -> None:
        """Make room for blocks of so many ranks; returns when they can be computed."""
        if max_rank > self.arguments["max_rank"]:
            self.between(lambda: self.arguments.reserve_rank(max_rank))

    def reserve_link(self, link: int) -> None:
        """Make room for a link, by the thread that looks. The number of places doubles between two launches."""
        have = num_links = self.arguments["num_links"]
        while num_links <= link:
            num_links *= 2
        if num_links == have:
            return
        if self.launches:
            self._stop_once()
        with self._starting:
            self.arguments.reserve_links(num_links)
        if self.launches:
            self._do_between()
            self._launch()

    def start(self) -> None:
        """Launch it for the first time."""
        with self._starting:
            self._launch()

    def _launch(self) -> None:
        self.launches += 1
        address = self.arguments.write()
        self._heartbeat.begin()
        self._queue.launch(self._name, address, self.launches)
        if self.launches == 1:
            self.gpu.try_writes()

    def look(self) -> None:
        """Launch it again if it left. Raises KernelLostError where it gave up, or its heart does not beat."""
        if not self._between.empty():
            self._stop_once()
            self._do_between()
            self._launch()
        elif self._has_left():
            self._check_arrivals()
            self._launch()
        self._heartbeat.check()

    def _check_arrivals(self) -> None:
        """Raise KernelLostError if it gave up: a block that waits at a barrier for 2 s does so for all."""
        try:
            gave_up = self.gpu.read(self.arguments["arrivals"] + 8, 8) != bytes(8)
        except RuntimeError as error:
            raise KernelLostError(f"the shard's GPU: {error}") from error
        if gave_up:
            raise KernelLostError("the shard's kernel: its blocks did not meet at a barrier")

    def between(self, action: Callable[[], None]) -> None:
        """Do this while no kernel runs, in the thread that looks; waits for it, and raises what it raises."""
        with self._starting:
            if self.launches == 0 or self._stopping.is_set():
                action()
                return
        future: Future[None] = Future()
        self._between.put((action, future))
        try:
            future.result(TAKEN_SECONDS)
        except TimeoutError:
            raise ShardUnavailableError("the shard's kernel: it does not leave; is the GPU stopped?") from None

    def apart(self, action: Callable[[], T]) -> T:
        """Do this while no kernel runs, in the thread that looks: its next look launches the kernel again."""
        if self.launches and not self._has_left():
            self._stop_once()
        return action()

    def _do_between(self) -> None:
        self._check_arrivals()
        while not self._between.empty():
            action, future = self._between.get()
            try:
                action()
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(None)

    def _has_left(self) -> bool:
        return self.mailbox.left == self.launches

    def _tell(self, kind: CommandKind) -> None:
        wait_until(lambda: self._has_left() or self.mailbox.try_post(kind) is not None, "it takes no commands")

    def _stop_once(self) -> None:
        self._tell(CommandKind.STOP)
        wait_until(self._has_left, "it does not leave")

    def stop(self) -> None:
        """Refuse what waits, end what runs, leave; idempotent, by the thread that looks."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        if self.launches and not self._has_left():
            self._tell(CommandKind.DRAIN)
            self._stop_once()
        self._queue.close()
        self._do_between()
        self.mailbox.close()


class Heartbeat:
    """The heartbeat of a kernel that runs."""

    def __init__(self, mailbox: Mailbox, seconds: float) -> None:
        self._mailbox, self._seconds = mailbox, seconds
        self.begin()

    def begin(self) -> None:
        """Expect a beat from now on."""
        self._beat, self._beaten = self._mailbox.beat, time.monotonic()

    def check(self) -> None:
        """Raise KernelLostError if it did not beat for too long."""
        if self._mailbox.beat != self._beat:
            self.begin()
        elif time.monotonic() - self._beaten > self._seconds:
            raise KernelLostError(f"the shard's kernel: no heartbeat for {self._seconds:g} s")
