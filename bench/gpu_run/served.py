"""Stage `served`: a server with a kernel that serves, and one link to it. First of all: is it right?

answers      equal bit for bit those of a client over shared memory, where the host carries the rows
by Link      push and wait of one step, as an engine without graphs does it; the host waits
captured     put and add in a CUDA graph that is replayed; by events of the GPU, and 1,000 times
an error     a step that names an unknown adapter is refused, and the link goes on
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from typing_extensions import override

from bench.gpu_run import stage
from bench.gpu_run.lab import NAMES, Lab, open_lab
from bench.gpu_run.record import Checks, Record
from client_connector.packing import code_of
from client_connector.remote import RemoteServer, RemoteSession
from kernels_cuda.routing import Route
from lora_server.device.client.captured import Captured, CapturedSite
from lora_server.device.client.link import KernelLink
from lora_server.errors import UnknownAdapterError
from lora_server.spec import PROJECTIONS, Site
from lora_server.wire import slot
from lora_server.wire.slot import RequestHeader

SITE, ROWS = Site(0, "qkv"), 16
ROUNDS, WARM_UP = 300, 30
MANY = 1_000  # where two processes share a GPU without MPS, a step takes two time slices: some 4 ms
SECONDS = 20.0
NOBODYS = (1 << 16) + 999
CAPTURE = "thread_local"  # what other threads ask of CUDA meanwhile does not spoil the capture


class Steps:
    """Steps of one client and one adapter, with `rows` rows each."""

    def __init__(self, session: RemoteSession, device: torch.device, rows: int = ROWS) -> None:
        (held,) = session.acquire([NAMES[0]])
        spec = session.terms.spec
        self.link, self.terms, self.handle, self.seq = session.links[0], session.terms, held.handle, 0
        self.rows, self.dtype = rows, code_of(session.terms, torch.bfloat16)
        self.width, self.windows = spec.in_width(SITE), ((0, spec.out_width(SITE)),)
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(rows, self.width, generator=generator).bfloat16().to(device)

    def header(self, seq: int, flags: int, payload_bytes: int) -> RequestHeader:
        """Make the header of a step of all rows."""
        return RequestHeader(
            step_class=slot.DECODE, flags=flags, client=self.terms.client, epoch=self.terms.epoch, seq=seq,
            slot=seq % self.link.region.layout.depth, layer=SITE.layer,
            projection=PROJECTIONS.index(SITE.projection), dtype=self.dtype, num_rows=self.rows,
            num_entries=self.rows, num_segments=1, num_out_rows=self.rows, in_begin=0, in_end=self.width,
            windows=self.windows, payload_bytes=payload_bytes, budget_us=round(SECONDS * 1e6), pushed_ns=0,
        )  # fmt: skip

    def once(self) -> torch.Tensor:
        """A step by Link; its rows, on the host."""
        self.seq += 1
        row_bytes, scales = self.width * slot.ELEMENT_BYTES[self.dtype], slot.num_scales(self.rows, self.dtype)
        at = slot.request_offsets(1, self.rows, 0, self.rows * row_bytes, scales)
        header, memory = self.header(self.seq, 0, at.end - slot.HEADER_BYTES), self.link.region.request(self.seq)
        header.pack_into(memory)
        np.frombuffer(memory, np.int32, 4, at.segments)[:] = [self.handle, 0, 0, self.rows]
        self.link.put_rows(header, self.x, torch.arange(self.rows))
        self.link.push(self.seq, at.end)
        self.link.wait(self.seq, time.monotonic() + SECONDS)
        return self.link.rows.deltas(header, self.x).to("cpu", copy=True)  # the next step's lie there, too


class Passes:
    """A step as launches of put and add with arguments that never change."""

    def __init__(self, steps: Steps, link: KernelLink) -> None:
        self.captured, self.device, rows = Captured(link), link.device, steps.rows
        self.route, self.steps = Route.empty(rows, self.device, max_rows=rows), steps
        order = torch.arange(rows, dtype=torch.int32, device=self.device)
        for tensor in (self.route.token_M, self.route.pair_N, self.route.row_N):
            assert tensor is not None
            tensor.copy_(order)
        self.aim(steps.handle)
        self.y = torch.zeros(rows, steps.windows[0][1], dtype=torch.bfloat16, device=self.device)
        header = steps.header(0, slot.HAS_IN_MAP, 0)
        self.site: CapturedSite = self.captured.site(header, steps.x, self.route, by_entry=False)
        self.captured.begin(SECONDS)

    def aim(self, handle: int) -> None:
        """Give all rows this adapter."""
        rows = self.steps.rows
        self.route.counts.copy_(torch.tensor([1, rows, rows, rows], dtype=torch.int32))
        self.route.segments[0].copy_(torch.tensor([handle, 0, 0, rows], dtype=torch.int32))

    def once(self) -> None:
        """Put, and add, which waits for the answer."""
        self.site.put()
        self.site.add(self.y)

    def run(self) -> torch.Tensor:
        """Run the step once on zeros and return the result. Raises the step's error."""
        self.y.zero_()
        self.once()
        rows = self.y.cpu()
        self.captured.finish()
        return rows


class Graph(Passes):
    """A Passes in a CUDA graph, which `once` replays."""

    def __init__(self, steps: Steps, link: KernelLink) -> None:
        super().__init__(steps, link)
        self.route.counts.zero_()  # nothing is sent while it is captured
        super().once()
        torch.cuda.synchronize(self.device)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, capture_error_mode=CAPTURE):
            super().once()
        self.aim(steps.handle)

    @override
    def once(self) -> None:
        self.graph.replay()

    def replay_us(self) -> float:
        """Time a replay by events of the GPU."""
        return timed_us(self.device, self.once)


def passed(steps: Steps) -> Passes:
    """Make the passes of these steps: in a CUDA graph on a GPU, as plain launches otherwise."""
    assert isinstance(steps.link, KernelLink)
    return (Graph if steps.link.device.type == "cuda" else Passes)(steps, steps.link)


def timed_us(device: torch.device, work: Callable[[], object]) -> float:
    """Time what `work` queues on torch's current stream: by events on a GPU, by the clock on a CPU."""
    if device.type != "cuda":
        began = time.perf_counter()
        work()
        return 1e6 * (time.perf_counter() - began)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    work()
    end.record()
    ended(end)
    return 1e3 * float(start.elapsed_time(end))


def ended(event: torch.cuda.Event, seconds: float = SECONDS) -> None:
    """Wait until the GPU has come to an event. Raises TimeoutError."""
    deadline = time.monotonic() + seconds
    while not event.query():
        if time.monotonic() > deadline:
            raise TimeoutError(f"the GPU did not end within {seconds:g} s")


@contextlib.contextmanager
def joined(lab: Lab, transport: str, device: str) -> Iterator[RemoteSession]:
    """A session that is left at the end."""
    session = RemoteServer(lab.server.address, transport, device=device).join()
    try:
        yield session
    finally:
        session.leave()


def note(record: Record, what: str, once: Callable[[], float], **about: object) -> None:
    """Take the time of something many times, and record the median and the tail, in us."""
    kept = sorted([once() for _ in range(WARM_UP + ROUNDS)][WARM_UP:])
    median, late = statistics.median(kept), kept[int(0.95 * len(kept))]
    record.add("latency", what=what, **about, median_us=round(median, 2), p95_us=round(late, 2))


def by_link_us(steps: Steps) -> float:
    """Time one step by Link, with its rows on the host."""
    began = time.perf_counter()
    steps.once()
    return 1e6 * (time.perf_counter() - began)


def told(graph: Graph) -> bool:
    """Tell whether a step with an unknown adapter is an error, and the next one is right again."""
    graph.aim(NOBODYS)
    try:
        graph.run()
    except UnknownAdapterError:
        graph.aim(graph.steps.handle)
        return True
    return False


def work(record: Record, arguments: argparse.Namespace) -> bool:
    """Whether every answer is the one that a host's client gets; times are only written down."""
    checks = Checks(record)
    with (
        tempfile.TemporaryDirectory(prefix="lora-served-") as scratch,
        open_lab(record, Path(scratch), "cuda", "gpu") as lab,
    ):
        with joined(lab, "shm", "cpu") as session:
            expected = Steps(session, torch.device("cpu")).once()
        with joined(lab, "gpu", "cuda") as session:
            steps = Steps(session, torch.device("cuda", 0))
            checks.judge("by Link", torch.equal(steps.once(), expected))
            note(record, "push and wait by Link", lambda: by_link_us(steps))
        with joined(lab, "gpu", "cuda") as session:
            link = session.links[0]
            assert isinstance(link, KernelLink)
            graph = Graph(Steps(session, torch.device("cuda", 0)), link)
            checks.judge("captured", torch.equal(graph.run(), expected))
            note(record, "put and add in a graph", graph.replay_us)
            checks.judge("an error is told", told(graph))
            for _ in range(MANY):  # one stream: each waits for the one before
                graph.once()
            checks.judge(f"after {MANY} steps", torch.equal(graph.run(), expected))
        print(lab.server.tail())
    return checks.good


if __name__ == "__main__":
    stage.main(work, stage.parser(__doc__).parse_args(), modules=("cupy",))
