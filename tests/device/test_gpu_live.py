"""A kernel that serves, on a real GPU, with its host and a client in one process.

What a shard's threads call beside the kernel must not wait for its end, which is `IDLE_SECONDS` away here, and never
comes while clients keep it busy. Other calls are timed to be known.
"""

from __future__ import annotations

import functools
import mmap
import time
from collections.abc import Callable

import numpy as np
import pytest
import torch

from kernels_cuda.cpu import lora_step
from kernels_cuda.ops import Step
from lora_server.device.protocol.gpu import Gpu
from lora_server.device.protocol.needs import ask, missing
from lora_server.device.protocol.opened import gpu_of
from lora_server.placement import Layout, Placement
from tests.support.gpu.gpu_steps import ROWS, SITE, Host
from tests.support.serving import until
from tests.support.stores import cpu_store, load, pinned

pytestmark = pytest.mark.cuda

IDLE_SECONDS, AT_MOST_SECONDS = 6.0, 5.0
STEPS, STEPS_SECONDS = 200, 50.0  # as long as eight waits for the kernel
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
    store = cpu_store(Placement(host.spec, Layout.parse("ep1-pp1")), 0, torch.bfloat16)
    assert load(store, steps.handle, path).result() is None
    with pinned(store, {steps.handle}, SITE.layer):
        segments = store.gather(SITE, np.array([[steps.handle, 0, 0, ROWS]], np.int32), "a test")
        out = torch.empty(ROWS, host.spec.out_width(SITE), dtype=torch.bfloat16)
        counts = {"num_entries": ROWS, "num_out_rows": ROWS}
        lora_step(Step(rows_TK=steps.x, segments=segments, windows=steps.windows, **counts), out)
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


@pytest.fixture(scope="module")
def beside(host):
    """What is called, by name; what it makes is kept. In this order."""
    import cupy

    gpu, runtime, stream = host.gpu, cupy.cuda.runtime, torch.cuda.current_stream()
    kept, unpin = list[object](), list[Callable[[], None]]()
    memory = torch.zeros(2 * MIB, dtype=torch.uint8, device=gpu.device)
    shared, pages = gpu.create(2 * MIB), mmap.mmap(-1, MIB)
    mapped, pinned_memory = gpu.map(shared.fd, 2 * MIB), torch.zeros(2 * MIB, dtype=torch.uint8, pin_memory=True)

    def load_pages() -> None:
        with host.tier.on_stream():
            memory.copy_(pinned_memory, non_blocking=True)
            kept.append(torch.tensor([1, 2, 3]).to(gpu.device))
        host.tier.synchronize()

    def fill() -> None:
        kept.append(torch.zeros(MIB, dtype=torch.uint8, device=gpu.device))
        stream.synchronize()

    def make_a_queue() -> None:
        """Of a new stream: those that other tests gave back are nobody's."""
        gpu.streams._spare[False].clear()
        gpu.queue().close()

    return {
        "creates shared memory": lambda: kept.append(gpu.create(64 * MIB)),
        "maps shared memory": lambda: kept.append(gpu.map(shared.fd, 2 * MIB)),
        "unmaps shared memory": mapped.close,
        "allocates": lambda: kept.append(runtime.malloc(64 * MIB)),
        "writes": lambda: gpu.write(memory.data_ptr(), bytes(4096)),
        "writes a word": lambda: gpu.write_word(memory.data_ptr(), 7),
        "reads": lambda: kept.append(gpu.read(memory.data_ptr(), 4096)),
        "makes a queue": make_a_queue,
        "loads pages": load_pages,
        "fills": fill,
        "sums": lambda: kept.append(int(memory.long().sum())),
        "pins": lambda: unpin.append(gpu.pin(memoryview(pages))[1]),
        "unpins": lambda: unpin.pop()(),
        "allocates pinned memory": lambda: kept.append(runtime.hostAlloc(16 * MIB, 0)),
        "frees": lambda: runtime.free(runtime.malloc(2 * MIB)),
    }


MUST = (  # what listeners, loaders and the pump do beside a kernel
    *("creates shared memory", "maps shared memory", "unmaps shared memory", "allocates", "writes", "writes a word"),
    *("reads", "makes a queue", "loads pages", "fills"),
)
MAY = ("sums", "pins", "allocates pinned memory")  # an engine's
# They wait until no kernel runs: seconds, or for ever, as it is launched again when it leaves. So it leaves for them.
APART = ("unpins", "frees")


@pytest.mark.parametrize("name", MUST + MAY + APART)
def test_a_shard_does_not_wait_for_its_kernel(host, steps, beside, name, record_property):
    """A call begins just after a step, when the kernel has all its idle time before it; others end when it leaves."""
    call = functools.partial(host.kernel.between, beside[name]) if name in APART else beside[name]
    step(steps)
    began = time.perf_counter()
    call()
    took = time.perf_counter() - began
    record_property("ms", round(1e3 * took, 2))
    record_property("waits_for_the_kernel", took > AT_MOST_SECONDS)
    assert name in MAY or took < AT_MOST_SECONDS, f"it waited {took:.2f} s for the kernel to leave"
    step(steps)
