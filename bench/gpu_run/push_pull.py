"""Stage `push-pull`: one way and a whole step, pushed and pulled, beside a raw put of the same bytes, by size.

push      a client's own kernel (link_put_vectors): header, tables, and rows that it gathers, then the signal
raw put   the same bytes as they lie, by as many blocks; and a copy engine's copy, for what it is worth
pull      a header is put, and the shard's blocks load the rows from the client's memory: a round trip more

One way: from a stamp before the client's kernel until all rows are there, by the GPU's own clock. A step: until the
client has seen the answer, as many bytes, which the shard pushes in both cases. Both ends share one GPU and its memory
here: the figures show the cost of a round trip, not the bandwidth of a link.
"""

from __future__ import annotations

import argparse
import re
import statistics
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from bench.gpu_run import stage
from bench.gpu_run.record import Record
from bench.gpu_run.served import timed_us
from kernels_cuda.build import STANDARD, read_source
from lora_server.device.nvshmem import nvshmem_build
from lora_server.device.protocol import layout, source
from lora_server.wire import slot
from lora_server.wire.slot import RequestHeader

SOURCE = Path(__file__).with_name("push_pull.cu")
SIZES = tuple(16 << 10 << 2 * power for power in range(6))  # 16 KB to 16 MB
ROW_BYTES = 8 << 10
ROUNDS, WARM_UP = 200, 20
TAKE_BLOCKS, SHARED_BYTES, LIMIT_NS = 64, 256, 500_000_000
MOST_OVER_RAW = 1.2
JUDGED_BYTES = 256 << 10  # below, what a push does beside its bytes counts: two trips to memory of 0.3 to 0.6 us each
EPOCH = 1
WAYS = ("push", "raw put", "pull")
SIGNAL, PUT_ARRIVED, TAKE_ARRIVED, REPLY, BEGAN, HERE, DONE = range(7)  # words
ARGUMENTS = {"stamp": 1, "raw_put": 6, "take": 10, "await_answer": 4, "far_put": 5, "far_take": 10}


class Times(NamedTuple):
    """The times of one exchange, in us."""

    one_way: float
    step: float


def take_values(
    signal: int, value: int, origin: int, rows: int, answer: int, nbytes: int, arrived: int, here: int, reply: int,
    limit_ns: int,
) -> list[int]:  # fmt: skip
    """Return the arguments of `take`; `origin` is 0 for rows that came with the signal."""
    return [signal, value, origin, rows, answer, nbytes, arrived, here, reply, limit_ns]


def await_values(reply: int, value: int, limit_ns: int, done: int) -> list[int]:
    """Return the arguments of `await_answer`."""
    return [reply, value, limit_ns, done]


def text() -> str:
    """The kernels, with all that they include."""
    return read_source(SOURCE.name, source.FILES | {SOURCE.name: SOURCE.read_text()})


class Kernels:
    """push_pull.cu's, and link.cu's put, launched on torch's current stream."""

    def __init__(self, device: torch.device) -> None:
        import cupy

        from lora_server.device.protocol.cuda import open_cuda
        from lora_server.device.protocol.cuda_kernels import LINK, PUT_BLOCKS

        self.device, self.blocks, self.threads = device, PUT_BLOCKS, 32 * LINK.warps
        self.gpu: Any = open_cuda(device)
        self.gpu.compile("link.cu")
        self._module = cupy.RawModule(code=text(), options=(STANDARD, *LINK.defines))

    def launch(self, kernel: str, values: list[int], blocks: int) -> None:
        """One of push_pull.cu's."""
        import cupy

        from kernels_cuda.cuda import on_torch_stream

        function, numbers = self._module.get_function(kernel), tuple(cupy.uint64(value) for value in values)
        with on_torch_stream(self.device):
            function((blocks,), (self.threads,), numbers, shared_mem=SHARED_BYTES)


class Ends:
    """A client and a shard in one process, each with a stream; rows of one size."""

    def __init__(self, kernels: Kernels, nbytes: int) -> None:
        device = kernels.device
        self.kernels, self.nbytes, self.count = kernels, nbytes, nbytes // ROW_BYTES
        self.client, self.shard = torch.cuda.Stream(device, priority=-1), torch.cuda.Stream(device)
        self.x = torch.randn(self.count, ROW_BYTES // 2, device=device).bfloat16()
        self.order = torch.randperm(self.count, device=device).int()
        self.at = slot.request_offsets(1, self.count, slot.HAS_IN_MAP, nbytes)
        self.slot, self.answer = (torch.zeros(self.at.end, dtype=torch.uint8, device=device) for _ in range(2))
        self.words = torch.zeros(16 * (DONE + 1), dtype=torch.int64, device=device)  # each in a line of its own
        self.value = 0
        self._state(device)

    def word(self, index: int) -> int:
        """Return the address of a word."""
        return self.words.data_ptr() + 128 * index

    def _state(self, device: torch.device) -> None:
        """Make the memory that link_put_vectors reads: one segment, all entries."""
        block = np.zeros(1, layout.CLIENT)
        own = {"epoch": EPOCH, "client": 1, "depth": 1, "request_slots": self.slot.data_ptr(), "budget_ns": LIMIT_NS}
        own |= {"request_signal": self.word(SIGNAL), "pe": layout.HERE}
        for name, number in own.items():
            block[name] = number
        self.state = torch.frombuffer(bytearray(block.tobytes()), dtype=torch.uint8).to(device)
        memory = bytearray(slot.HEADER_BYTES)
        counts = (self.count, self.count, 1, self.count, 0, ROW_BYTES // 2)
        RequestHeader(0, slot.HAS_IN_MAP, 1, EPOCH, 0, 0, 0, 0, 0, *counts, ((0, 1),), 0, 0, 0).pack_into(
            memoryview(memory)
        )
        self.header = torch.frombuffer(memory, dtype=torch.uint8).to(device)
        numbers = [1, self.count, self.count, self.count], [0, 0, 0, self.count]
        self.counts, self.segments = (torch.tensor(one, dtype=torch.int32, device=device) for one in numbers)
        self.map = torch.arange(self.count, dtype=torch.int32, device=device)
        self.sent = torch.zeros(1, dtype=torch.int64, device=device)

    def send(self, way: str) -> None:
        """The client's kernel, behind a stamp."""
        self.kernels.launch("stamp", [self.word(BEGAN)], 1)
        if way == "push":
            tensors = (self.state, self.sent, self.header, self.x, self.counts, self.segments, self.order, self.map)
            values = (*(tensor.data_ptr() for tensor in tensors), 0, ROW_BYTES, ROW_BYTES)
            self.kernels.gpu.functions.launch("link_put_vectors", values)
            return
        rows = self.slot.data_ptr() + self.at.rows
        to, nbytes = (self.slot.data_ptr(), slot.HEADER_BYTES) if way == "pull" else (rows, self.nbytes)
        values = (self.x.data_ptr(), to, nbytes, self.word(PUT_ARRIVED), self.word(SIGNAL), self.signal)
        self.kernels.launch("raw_put", [*values], self.kernels.blocks)

    def take(self, way: str) -> None:
        """The shard's kernel."""
        origin, rows = self.x.data_ptr() if way == "pull" else 0, self.slot.data_ptr() + self.at.rows
        words = (self.word(TAKE_ARRIVED), self.word(HERE), self.word(REPLY))
        values = (self.word(SIGNAL), self.signal, origin, rows, self.answer.data_ptr(), self.nbytes, *words, LIMIT_NS)
        self.kernels.launch("take", take_values(*values), TAKE_BLOCKS)

    @property
    def signal(self) -> int:
        """The signal word of the current exchange."""
        return slot.signal(EPOCH, self.value)

    def exchange(self, way: str, first: bool = False) -> Times:
        """Make one exchange and return its times. With `first`, the shard's kernel is launched after the client's has
        ended, so that neither waits while the other's kernel is loaded. Raises TimeoutError."""
        self.value += 1
        assert layout.CLIENT.fields is not None
        self.state[layout.CLIENT.fields["pushed"][1] :][:8].view(torch.int64).fill_(self.value - 1)
        self.words[16 * BEGAN :].zero_()
        torch.cuda.synchronize(self.kernels.device)
        launches = [(self.shard, self.take), (self.client, self.send)]
        for stream, launch in reversed(launches) if first else launches:
            with torch.cuda.stream(stream):
                launch(way)
            if first:
                stream.synchronize()
        with torch.cuda.stream(self.client):
            self.kernels.launch(
                "await_answer", await_values(self.word(REPLY), self.signal, LIMIT_NS, self.word(DONE)), 1
            )
        torch.cuda.synchronize(self.kernels.device)
        stamps = self.words.tolist()[::16]
        if not (stamps[HERE] and stamps[DONE]):
            raise TimeoutError(f"{way} of {self.nbytes} bytes: no answer within {LIMIT_NS / 1e9:g} s")
        return Times((stamps[HERE] - stamps[BEGAN]) / 1e3, (stamps[DONE] - stamps[BEGAN]) / 1e3)

    def right(self, way: str) -> bool:
        """Whether the rows that came, and those that were answered, are the client's."""
        expected = (self.x[self.order] if way == "push" else self.x).view(torch.uint8).flatten()
        came = self.slot[self.at.rows : self.at.end]
        return torch.equal(came, expected) and torch.equal(self.answer[: self.nbytes], expected)

    def copied_us(self) -> float:
        """Time a copy of contiguous bytes, by a copy engine or by what the driver uses instead."""
        came = self.slot[self.at.rows : self.at.end]
        return timed_us(self.kernels.device, lambda: came.copy_(self.x.view(torch.uint8).flatten()))


def size(record: Record, kernels: Kernels, nbytes: int) -> bool:
    """Measure all ways by turns. Returns whether all rows arrived, and a push stays within its limit."""
    ends, times = Ends(kernels, nbytes), {way: list[Times]() for way in WAYS}
    good = True
    for way in WAYS:
        ends.exchange(way, first=True)
        good = good and ends.right(way)
    copies = []
    for _ in range(WARM_UP + ROUNDS):
        for way in WAYS:
            times[way].append(ends.exchange(way))
        copies.append(ends.copied_us())
    for way in WAYS:
        ends.exchange(way)
        good = good and ends.right(way)
    (push, push_step), (raw, _), (pull, pull_step) = (medians(times[way]) for way in WAYS)
    ratios = {"push_over_raw": push / raw, "pull_over_push": pull / push, "step_pull_over_push": pull_step / push_step}
    found = {
        "push_us": push, "raw_put_us": raw, "pull_us": pull, "copy_us": statistics.median(copies[WARM_UP:]),
        "push_step_us": push_step, "pull_step_us": pull_step, **ratios,
    }  # fmt: skip
    record.add("push_pull", bytes=nbytes, **{name: round(value, 2) for name, value in found.items()})
    record.add("check", name=f"rows of {nbytes} bytes", good=good)
    if nbytes < JUDGED_BYTES:
        return good
    near = push <= MOST_OVER_RAW * raw
    record.add("check", name=f"a push of {nbytes} bytes within {MOST_OVER_RAW} of a raw put", good=near)
    return good and near


def medians(times: list[Times]) -> Times:
    """Without those of the warm-up."""
    kept = times[WARM_UP:]
    return Times(*(statistics.median(column) for column in zip(*kept, strict=True)))


def check(record: Record, _: argparse.Namespace) -> None:
    """Check that kernels and launches agree on arguments, and build for NVSHMEM if it is here. Raises ValueError."""
    for kernel, expected in ARGUMENTS.items():
        declared = re.search(rf"\b{kernel}\(([^)]*)\)", SOURCE.read_text())
        if declared is None or declared[1].count(",") + 1 != expected:
            raise ValueError(f"{SOURCE.name}: {kernel} does not take {expected} arguments")
    if missing := nvshmem_build.missing():
        record.add("absent", what=missing)
        return
    options = ["-DBULK_COPY=0", "-DWARPS=8", "-DSTAGES=2", "-DNVSHMEM=1"]
    record.add("built", bytes=len(nvshmem_build.build(text(), "sm_90", options)))


def work(record: Record, _: argparse.Namespace) -> bool:
    """Every size, whatever became of those before it."""
    torch.set_grad_enabled(False)
    kernels, good = Kernels(torch.device("cuda", 0)), True
    for nbytes in SIZES:
        good = size(record, kernels, nbytes) and good
    return good


if __name__ == "__main__":
    stage.main(work, stage.parser(__doc__).parse_args(), modules=("cupy", "cuda.bindings"), check=check)
