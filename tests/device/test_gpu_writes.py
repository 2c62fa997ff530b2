"""Which stream the host of a kernel that serves writes on: one whose writes do not wait for the kernel."""

from __future__ import annotations

import contextlib
import itertools

import pytest

from lora_server.device.protocol import cuda
from tests.support.gpu import emulated_gpu
from tests.support.gpu.gpu_steps import Host
from tests.support.serving import until


class Stream:
    """As CUDA's: busy until what was put on it is done; behind the kernel that serves, that is never."""

    def __init__(self, behind_the_kernel: bool) -> None:
        self.behind_the_kernel, self.written = behind_the_kernel, 0

    def query(self) -> bool:
        return not (self.behind_the_kernel and self.written)


def write(stream: Stream) -> None:
    stream.written += 1


def test_a_stream_whose_write_waits_for_the_kernel_is_replaced_and_logged(capsys):
    first, others = Stream(True), iter([Stream(True), Stream(False), Stream(False)])
    found = cuda.unblocked(first, others.__next__, write, 0.001)
    assert not found.behind_the_kernel and found.written == 1
    assert len(list(others)) == 1, "no more are taken"
    assert capsys.readouterr().out.count("a write waits for the kernel that serves") == 2
    assert cuda.unblocked(found, others.__next__, write, 0.001) is found


def test_writes_that_all_wait_are_late_and_not_lost(capsys):
    taken = [Stream(True) for _ in range(cuda.MOST_STREAMS)]
    found = cuda.unblocked(taken[0], itertools.islice(taken, 1, None).__next__, write, 0.001)
    assert found is taken[-1] and all(stream.written == 1 for stream in taken)
    assert "every write waits for the kernel" in capsys.readouterr().out


class CountingGpu(emulated_gpu.EmulatedGpu):
    tried = 0

    def try_writes(self) -> None:
        self.tried += 1


@pytest.mark.emulator
def test_writes_are_tried_behind_the_first_launch_alone(tmp_path):
    emulated_gpu.compile_all()
    gpu = CountingGpu()
    with contextlib.closing(Host(tmp_path, gpu=gpu, idle_ns=20_000_000)) as host:
        until(lambda: host.kernel.launches > 2, "it left, twice")
        assert gpu.tried == 1
