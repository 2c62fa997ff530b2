"""A kernel that serves, on a real GPU, with its host and a client in one process: what a GPU's first minute has to say.

What a shard's threads call beside the kernel must not wait for its end, which is `IDLE_SECONDS` away here, and never
comes while clients keep it busy. Other calls are timed to be known.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable

import numpy as np
import pytest
import torch

from kernels_cuda.cpu import lora_step
from kernels_cuda.ops import Step
from lora_server.placement import Layout, Placement
from lora_server.transport.gpu.gpu import Gpu
from lora_server.transport.gpu.needs import ask, missing
from lora_server.transport.gpu.opened import gpu_of
from tests.support.gpu.gpu_host import Host
from tests.support.gpu.gpu_steps import ROWS, SITE
from tests.support.serving import until
from tests.support.stores import cpu_store, load, pinned

pytestmark = pytest.mark.cuda

IDLE_SECONDS, AT_MOST_SECONDS = 2.0, 1.0
STEPS, STEPS_SECONDS = 200, 10.0
MIB = 1 << 20


@pytest.fixture(scope="module")
def gpu():
    assert missing(ask(0)) == []
    one = gpu_of(torch.device("cuda", 0))
    for source in sorted(set(Gpu.kernels.values())):  # none is loaded beside the kernel
        one.compile(source)
    return one


@pytest.fixture(scope="module")
def host(tmp_path_factory, gpu):
    one = Host(tmp_path_factory.mktemp("shard"), idle_ns=round(IDLE_SECONDS * 1e9), gpu=gpu)
    yield one
    one.close()


@pytest.fixture(scope="module")
def steps(host, tiny_adapters):
    one = host.join(host.load(tiny_adapters["all"]))
    yield one
    one.link.close()


def test_a_queue_is_a_stream_of_its_own(gpu):
    queues = [gpu.queue(urgent) for urgent in (False, True) for _ in range(40)]
    streams = {queue._stream.cuda_stream for queue in queues}
    assert len(streams) == len(queues)
    for queue in queues:
        queue.close()
    assert gpu.queue()._stream.cuda_stream in streams


def test_the_kernel_runs_and_its_heart_beats(host):
    until(lambda: host.kernel.launches, "it is launched")
    before = host.kernel.mailbox.beat
    until(lambda: host.kernel.mailbox.beat != before, "it beats")


def expected(host: Host, steps, path) -> torch.Tensor:
    """What a host computes."""
    store = cpu_store(Placement(host.spec, Layout.parse("ep1-pp1")), 0, torch.bfloat16)
    assert load(store, steps.handle, path).result() is None
    with pinned(store, {steps.handle}, SITE.layer):
        segments = store.gather(SITE, np.array([[steps.handle, 0, 0, ROWS]], np.int32), "a test")
        out = torch.empty(ROWS, host.spec.out_width(SITE), dtype=torch.bfloat16)
        lora_step(
            Step(rows_TK=steps.x, segments=segments, num_entries=ROWS, num_out_rows=ROWS, windows=steps.windows), out
        )
    store.close()
    return out.float()


def step(steps) -> torch.Tensor:
    """Its rows, compared on the host: torch's larger kernels have no room beside one that serves."""
    found = steps.step()
    assert isinstance(found, torch.Tensor), found
    return found.cpu()


def test_a_step_is_right_again_and_again(host, steps, tiny_adapters, record_property):
    first = step(steps)
    wanted = expected(host, steps, tiny_adapters["all"])
    assert (first.float() - wanted).norm() < 1e-2 * wanted.norm()
    began, done = time.perf_counter(), 0
    while done < STEPS and time.perf_counter() - began < STEPS_SECONDS:
        assert torch.equal(step(steps), first)
        done += 1
    record_property("us_per_step", round(1e6 * (time.perf_counter() - began) / done, 1))
    assert done == STEPS, f"{done} steps in {STEPS_SECONDS} s: something of a step waits for the kernel to leave"


def test_a_kernel_that_left_serves_again(host, steps):
    launches = host.kernel.launches
    until(lambda: host.kernel.launches > launches, "it was idle, and was launched again", IDLE_SECONDS + 20)
    step(steps)


class Beside:
    """What is called; it keeps what it makes."""

    def __init__(self, host: Host) -> None:
        import cupy

        self.gpu, self.tier, self.runtime = host.gpu, host.tier, cupy.cuda.runtime
        self.kept: list[object] = []
        self.memory = torch.zeros(2 * MIB, dtype=torch.uint8, device=self.gpu.device)
        self.shared = self.gpu.create(2 * MIB)
        self.mapped = self.gpu.map(self.shared.fd, 2 * MIB)
        self.host = torch.zeros(2 * MIB, dtype=torch.uint8, pin_memory=True)
        self.pages = mmap.mmap(-1, MIB)

    def creates_shared_memory(self) -> None:
        self.kept.append(self.gpu.create(64 * MIB))

    def maps_shared_memory(self) -> None:
        self.kept.append(self.gpu.map(self.shared.fd, 2 * MIB))

    def unmaps_shared_memory(self) -> None:
        self.mapped.close()

    def allocates(self) -> None:
        self.kept.append(self.runtime.malloc(64 * MIB))

    def writes(self) -> None:
        self.gpu.write(self.memory.data_ptr(), bytes(4096))

    def writes_a_word(self) -> None:
        self.gpu.write_word(self.memory.data_ptr(), 7)

    def reads(self) -> None:
        assert len(self.gpu.read(self.memory.data_ptr(), 4096)) == 4096

    def makes_a_queue(self) -> None:
        """Of a new stream: those that other tests gave back are nobody's."""
        self.gpu.streams._spare[False].clear()
        self.gpu.queue().close()

    def loads_pages(self) -> None:
        with self.tier.on_stream():
            self.memory.copy_(self.host, non_blocking=True)
            self.kept.append(torch.tensor([1, 2, 3]).to(self.gpu.device))
        self.tier.synchronize()

    def fills(self) -> None:
        self.kept.append(torch.zeros(MIB, dtype=torch.uint8, device=self.gpu.device))
        torch.cuda.current_stream().synchronize()

    def sums(self) -> None:
        assert int(self.memory.long().sum()) >= 0

    def pins(self) -> None:
        self.unpin = self.gpu.pin(memoryview(self.pages))[1]

    def unpins(self) -> None:
        self.unpin()

    def allocates_pinned_memory(self) -> None:
        self.kept.append(self.runtime.hostAlloc(16 * MIB, 0))

    def frees(self) -> None:
        self.runtime.free(self.runtime.malloc(2 * MIB))

    def multiplies(self) -> None:
        square = torch.ones(4096, 4096, dtype=torch.bfloat16, device=self.gpu.device)
        self.kept.append(square @ square)
        torch.cuda.current_stream().synchronize()


MUST = (  # what listeners, loaders and the pump do beside a kernel
    *("creates_shared_memory", "maps_shared_memory", "unmaps_shared_memory", "allocates", "writes", "writes_a_word"),
    *("reads", "makes_a_queue", "loads_pages", "fills"),
)
MAY = ("sums", "pins", "unpins", "allocates_pinned_memory", "frees", "multiplies")  # done apart, or an engine's


@pytest.fixture(scope="module")
def beside(host):
    return Beside(host)


def seconds(steps, call: Callable[[], None]) -> float:
    """Of a call that begins just after a step, when the kernel has all its idle time before it."""
    step(steps)
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


@pytest.mark.parametrize("name", MUST)
def test_a_shard_does_not_wait_for_its_kernel(host, steps, beside, name, record_property):
    took = seconds(steps, getattr(beside, name))
    record_property("ms", round(1e3 * took, 2))
    assert took < AT_MOST_SECONDS, f"it waited {took:.2f} s for the kernel to leave"
    step(steps)


@pytest.mark.parametrize("name", MAY)
def test_other_calls_end_when_the_kernel_leaves(host, steps, beside, name, record_property):
    took = seconds(steps, getattr(beside, name))
    record_property("ms", round(1e3 * took, 2))
    record_property("waits_for_the_kernel", took > AT_MOST_SECONDS)
    step(steps)
