"""A shard's kernel as its host sees it: launched, launched again when it leaves, watched, and stopped.

All that the kernel knows lies in the GPU's memory, so that it may leave after any turn. What cannot happen beside it
(more memory in the place of less) happens in between: see `between`.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import structlog
import torch

from kernels_cuda.launch import DTYPE_NAMES, Workspace
from kernels_cuda.residency import LANES
from lora_server.device.host.mailbox import TAKEN_SECONDS, Mailbox, wait_until
from lora_server.device.protocol import codes, layout
from lora_server.device.protocol.codes import ORDERS, CommandKind, Role
from lora_server.device.protocol.gpu import Gpu
from lora_server.device.protocol.layout import LINK, ORDER_BYTES, SERVE, parts
from lora_server.device.protocol.source import SERVES
from lora_server.errors import ShardUnavailableError
from lora_server.spec import PROJECTIONS, ModelSpec
from lora_server.wire import slot
from lora_server.wire.region import RegionLayout

IDLE_NS = 1_000_000_000
HEARTBEAT_SECONDS = 5.0
FIRST_RANK = 16
TABLE_ALIGN = 128
ROW_WORDS = 8  # a row of numbers fills so many, or twice as many ...
HELD, TURN = np.dtype("<u4"), np.dtype("<u8")
assert SERVE.fields is not None
HOSTS_BYTES = SERVE.fields["turn"][1]  # what a host says; the rest is the kernel's
log = structlog.get_logger()
T = TypeVar("T")


class KernelLostError(Exception):
    """The GPU serves no more in this process: the shard has to end, and is started anew."""


class ServeKernel:
    """One shard's. `look` is called by one thread, all the time; the rest from any."""

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
        self._in_codes = region.widest == slot.E4M3
        gpu.compile(SERVES[self._in_codes])
        self.gpu, self.spec, self.mailbox = gpu, spec, Mailbox(gpu)
        self._dtype, self._max_step_rows, self._heartbeat_seconds = dtype, max_step_rows, heartbeat_seconds
        self._queue = gpu.queue()
        self._launches = 0
        self._beat, self._beaten = 0, time.monotonic()
        self._between: queue.SimpleQueue[tuple[Callable[[], None], Future[None]]] = queue.SimpleQueue()
        self._stopping, self._starting = threading.Event(), threading.Lock()
        self._table_bytes = slot.aligned(region.table_bytes, TABLE_ALIGN)
        self._links = self._zeros(LANES * LINK.itemsize)
        self._tables = [self._zeros(LANES * self._table_bytes)]  # of so many links each
        self._orders = self._zeros(ORDERS * ORDER_BYTES)
        self._sites = self._device(self._all_sites())
        self._workspace = self._new_workspace(FIRST_RANK)
        self._holds: dict[int, frozenset[int]] = {}  # by link
        self._serve, self._host = self._zeros(SERVE.itemsize), np.zeros(1, SERVE)
        self._row_words = slot.aligned(1 + 2 * region.depth, ROW_WORDS)
        self._followers = self._zeros(LANES * TURN.itemsize)
        self._fill(idle_ns)

    def _zeros(self, nbytes: int) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8, device=self.gpu.device)

    def _device(self, array: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array.reshape(-1).view(np.uint8).copy()).to(self.gpu.device)

    def _all_sites(self) -> npt.NDArray[np.void]:
        sites = np.zeros((self.spec.layers, len(PROJECTIONS)), layout.SITE)
        for site in self.spec.sites():
            place = sites[site.layer, PROJECTIONS.index(site.projection)]
            place["in_width"], place["out_width"] = self.spec.in_width(site), self.spec.out_width(site)
            place["experts"] = self.spec.experts_at(site)
        return sites

    def _new_workspace(self, max_rank: int) -> Workspace:
        sites = list(self.spec.sites())
        return Workspace.new(
            max_entries=self._max_step_rows,
            max_rank=max_rank,
            max_in_width=max(map(self.spec.in_width, sites)),
            max_out_width=max(map(self.spec.out_width, sites)),
            device=self.gpu.device,
        )

    def _fill(self, idle_ns: int) -> None:
        host = self._host[0]
        tensors = {"orders": self._orders, "sites": self._sites, "followers": self._followers}
        for name, tensor in tensors.items():
            host[name] = tensor.data_ptr()
        self._use_links(self._links)
        host["mailbox"], host["idle_ns"] = self.mailbox.address, idle_ns
        host["max_entries"], host["table_bytes"] = self._max_step_rows, self._table_bytes
        host["dtype"] = slot.E4M3 if self._in_codes else slot.DTYPES.index(DTYPE_NAMES[self._dtype])
        if self._in_codes:
            widest = max(map(self.spec.out_width, self.spec.sites()))
            self._results = self._zeros(self._max_step_rows * widest * self._dtype.itemsize)
            host["results"] = self._results.data_ptr()
        host["row_words"] = self._row_words
        host["num_layers"], host["num_projections"] = self.spec.layers, len(PROJECTIONS)
        self._use(self._workspace)

    def _use(self, workspace: Workspace) -> None:
        self._workspace = workspace
        for name in ("partial", "v", "delta", "groups", "arrivals"):
            self._host[0][name] = getattr(workspace, name).data_ptr()
        self._other_partial = torch.empty_like(workspace.partial)
        self._host[0]["other_partial"] = self._other_partial.data_ptr()
        self._host[0]["max_rank"] = workspace.max_rank

    # -- what it reads

    def read_blocks(self, table: torch.Tensor) -> None:
        """The block table, before the kernel starts."""
        self._host[0]["blocks"] = table.data_ptr()

    def read_directory(self, entries: torch.Tensor, num_handles: int) -> None:
        """The directory of weights: before the kernel starts, or `between`."""
        self._host[0]["directory"], self._host[0]["num_handles"] = entries.data_ptr(), num_handles
        self._used, self._seen = self._zeros(TURN.itemsize * num_handles), 0
        self._host[0]["used"] = self._used.data_ptr()
        self._read_holds()

    def _read_holds(self) -> None:
        num_links, num_handles = int(self._host[0]["num_links"]), int(self._host[0]["num_handles"])
        held = np.zeros((num_links, num_handles), HELD)
        for link, handles in self._holds.items():
            for index, generation in map(parts, handles):
                if index < num_handles:
                    held[link, index] = generation
        self._held = self._device(held)
        self._host[0]["held"] = self._held.data_ptr()

    def read_places(self, places: torch.Tensor) -> None:
        """Of experts that differ in shape: before the kernel starts, or `between`."""
        self._host[0]["places"] = places.data_ptr()

    def used(self) -> list[int]:
        """Indices of handles that steps named since the last call, the oldest use first."""
        turns = np.frombuffer(self.gpu.read(self._used.data_ptr(), self._used.nbytes), TURN)
        newer = np.flatnonzero(turns > self._seen)
        if len(newer):
            self._seen = int(turns[newer].max())
        return [int(index) for index in newer[np.argsort(turns[newer], kind="stable")]]

    def reserve_rank(self, max_rank: int) -> None:
        """Blocks of so many ranks can be computed from now on."""
        if max_rank > self._workspace.max_rank:
            self.between(lambda: self._use(self._new_workspace(max_rank)))

    def reserve_link(self, link: int) -> None:
        """It may be connected from now on; by the thread that looks. Their number doubles between two launches."""
        have = num_links = int(self._host[0]["num_links"])
        while num_links <= link:
            num_links *= 2
        if num_links == have:
            return
        if self._launches:
            self._stop_once()
        with self._starting:
            links = self._zeros(num_links * LINK.itemsize)
            links[: self._links.numel()] = self._links
            self._use_links(links)
            self._tables += [self._zeros(LANES * self._table_bytes) for _ in range(have, num_links, LANES)]
            self._read_holds()
        if self._launches:
            self._do_between()
            self._launch()

    def _use_links(self, links: torch.Tensor) -> None:
        self._links = links
        self._host[0]["links"], self._host[0]["num_links"] = links.data_ptr(), links.numel() // LINK.itemsize

    def connect_words(self, link: int, words: dict[str, int]) -> list[int]:
        """CONNECT's, as in LINK, with the tables of a place."""
        tables = self._tables[link // LANES].data_ptr() + link % LANES * self._table_bytes
        words = words | {"tables": tables}
        return [words.get(str(name), 0) for name in (LINK.names or ())[: codes.CONNECT_WORDS]]

    def hold(self, link: int, handles: frozenset[int]) -> None:
        """What the client at a link may name from now on, and nothing else; by the thread that looks."""
        before, self._holds[link] = self._holds.get(link, frozenset()), handles
        for handle in before - handles:
            self._write_held(link, parts(handle)[0], 0)
        for handle in handles - before:
            self._write_held(link, *parts(handle))

    def _write_held(self, link: int, index: int, generation: int) -> None:
        """Beyond the directory nobody is known yet: it grows first."""
        num_handles = int(self._host[0]["num_handles"])
        if index < num_handles:
            at = (link * num_handles + index) * HELD.itemsize
            self.gpu.write(self._held.data_ptr() + at, generation.to_bytes(HELD.itemsize, "little"))

    # -- its stage, in leader mode

    @property
    def numbers_bytes(self) -> int:
        """Of a follower's table: a row for each link that its leader may have; see leader.cuh."""
        return codes.MAX_LINKS * self._row_words * TURN.itemsize

    def lead(self, tables: Sequence[int]) -> None:
        """Steps get numbers, which are stored into these: where this GPU sees each follower's table."""
        words = np.zeros(LANES, TURN)
        words[: len(tables)] = tables

        def tell() -> None:
            self._host[0]["role"] = Role.LEADS
            self.gpu.write(self._followers.data_ptr(), words.tobytes())

        self.between(tell)

    def follow(self, table: int) -> None:
        """Only steps that have a number in this table are served, the least first; 0: none is."""

        def tell() -> None:
            self._host[0]["role"], self._host[0]["numbers"] = Role.FOLLOWS, table

        self.between(tell)

    # -- its life

    def start(self) -> None:
        """The first launch."""
        with self._starting:
            self._launch()

    def _launch(self) -> None:
        """What the host says of it is read anew; the rest is the kernel's."""
        self._launches += 1
        self.gpu.settle()  # zeros and tables that torch made
        self.gpu.write(self._serve.data_ptr(), self._host.tobytes()[:HOSTS_BYTES])
        self._beat, self._beaten = self.mailbox.beat, time.monotonic()
        wire = "e4m3_" if self._in_codes else ""
        self._queue.launch(f"serve_{wire}{DTYPE_NAMES[self._dtype]}", self._serve.data_ptr(), self._launches)
        if self._launches == 1:
            self.gpu.try_writes()

    @property
    def launches(self) -> int:
        """How often it was launched."""
        return self._launches

    def look(self) -> None:
        """Launch it again if it left. Raises KernelLostError where it gave up, or its heart does not beat."""
        if not self._between.empty():
            self._stop_once()
            self._do_between()
            self._launch()
        elif self._has_left():
            self._check_arrivals()
            self._launch()
        self._watch()

    def _watch(self) -> None:
        beat, now = self.mailbox.beat, time.monotonic()
        if beat != self._beat:
            self._beat, self._beaten = beat, now
        elif now - self._beaten > self._heartbeat_seconds:
            raise KernelLostError(f"the shard's kernel: no heartbeat for {self._heartbeat_seconds:g} s")

    def _check_arrivals(self) -> None:
        """A block that waits at a barrier for 2 s gives up for all."""
        try:
            gave_up = self.gpu.read(self._workspace.arrivals.data_ptr() + 8, 8) != bytes(8)
        except RuntimeError as error:
            raise KernelLostError(f"the shard's GPU: {error}") from error
        if gave_up:
            raise KernelLostError("the shard's kernel: its blocks did not meet at a barrier")

    def between(self, action: Callable[[], None]) -> None:
        """Do this while no kernel runs, in the thread that looks; waits for it, and raises what it raises."""
        with self._starting:
            if self._launches == 0 or self._stopping.is_set():
                action()
                return
        future: Future[None] = Future()
        self._between.put((action, future))
        try:
            future.result(TAKEN_SECONDS)
        except TimeoutError:
            raise ShardUnavailableError("the shard's kernel: it does not leave; is the GPU stopped?") from None

    def apart(self, action: Callable[[], T]) -> T:
        """`between`, by the thread that looks: the next look launches it again."""
        if self._launches and not self._has_left():
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
        return self.mailbox.left == self._launches

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
        if self._launches and not self._has_left():
            self._tell(CommandKind.DRAIN)
            self._stop_once()
        self._queue.close()
        self._do_between()
        self.mailbox.close()
