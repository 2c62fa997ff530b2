"""Blocks beside each other on a multiprocessor, and that a client's find room beside one that serves."""

from __future__ import annotations

import itertools
import random

import pytest

from bench import gpu_build
from bench.gpu_build import HOPPER, SERVE_SHARED_BYTES, Job, Usage
from kernels_cuda.heuristics import choose
from kernels_cuda.residency import LANES, PARTITION_REGISTERS, PARTITIONS, SERVE_WARPS, ThreadBlock, fit, most_registers
from lora_server.device.protocol.codes import LinkStatus
from lora_server.device.protocol.cuda_kernels import SERVE_OWN_BYTES
from tests.support.gpu import gpu_world
from tests.support.gpu.gpu_clients import GpuClient
from tests.support.gpu.gpu_schedules import drive
from tests.support.gpu.gpu_shard import DEVICE, GRID, Shard
from tests.support.gpu.gpu_weights import BODIES
from tests.support.gpu.gpu_world import World, address

SERVE, LINK = Job("serve.cu", HOPPER), Job("link.cu", HOPPER)
COMPILED = {"serve": 165, "link_put": 64, "link_add": 48, "link_wait": 22}  # registers, as `make gpu-build` says
OVER_NVSHMEM = {"serve": 170, "link_put": 72, "link_add": 64, "link_wait": 26}
FILL = ThreadBlock(4, 32)  # torch's, of a tensor
NINE_WARPS = ThreadBlock(9, 160, 203_776)  # as the kernel that serves was, once
AT_FIRST = {
    "serve": NINE_WARPS,
    "link_put": ThreadBlock(8, 64),
    "link_add": ThreadBlock(8, 48),
    "link_wait": ThreadBlock(8, 20),
}


def fit_by_dealing(blocks):
    """The rule, the slow way: warps dealt out one by one, from every partition that a block may begin with."""

    def holds(first):
        left = [PARTITION_REGISTERS] * PARTITIONS
        for begin, block in zip(first, blocks, strict=True):
            for warp in range(block.warps):
                left[(begin + warp) % PARTITIONS] -= -(-LANES * block.registers // 256) * 256
        return min(left) >= 0

    return all(map(holds, itertools.product(range(PARTITIONS), repeat=len(blocks))))


@pytest.mark.parametrize("warps", [1, 4, 5, 8])
def test_what_fits_fits_however_its_warps_are_dealt_out(warps):
    for registers in range(8, 256, 8):
        for beside in (NINE_WARPS, ThreadBlock(8, 162)):
            blocks = [beside, ThreadBlock(warps, registers)]
            assert fit(blocks) == fit_by_dealing(blocks), blocks


def test_nine_warps_of_160_registers_leave_16_to_a_block_of_eight():
    assert most_registers(NINE_WARPS, 8) == 16
    assert not fit([NINE_WARPS, ThreadBlock(8, 20)]), "a wait of eight warps, that has 20"
    assert fit([NINE_WARPS, ThreadBlock(1, 32)])
    assert most_registers(ThreadBlock(SERVE_WARPS + 1, 162), 8) == 88
    assert not fit([ThreadBlock(8, 32, 120 << 10)] * 2), "shared memory"


def test_the_build_complains_of_a_kernel_that_finds_no_room():
    def crowded(serving, its):
        return gpu_build.crowded({SERVE: [Usage("serve_bfloat16", 0, 0, 0, serving)], LINK: [its]})

    put, wait = Usage("link_put_vectors", 0, 0, 0, 64), Usage("link_wait", 0, 0, 0, 20)
    assert crowded(162, put) == crowded(162, wait) == crowded(240, wait) == []
    (said,) = crowded(210, put)
    assert "link_put_vectors" in said and "210" in said
    assert crowded(162, put._replace(registers=89)) and not crowded(162, put._replace(registers=88))


def test_what_the_build_supposes_is_what_is_launched():
    chosen = choose((9, 0), 232_448 - SERVE_OWN_BYTES, SERVE_WARPS)
    assert chosen.warps == SERVE_WARPS and list(chosen.defines) == SERVE.variant.defines
    assert chosen.shared_bytes + SERVE_OWN_BYTES == SERVE_SHARED_BYTES


def blocks(registers):
    """Of each kernel, as hosts launch them."""
    jobs = {name: SERVE if name == "serve" else LINK for name in registers}
    return {name: job.block(Usage(name, 0, 0, 0, registers[name])) for name, job in jobs.items()}


@pytest.mark.parametrize("registers", [COMPILED, OVER_NVSHMEM], ids=["mapped", "nvshmem"])
def test_each_of_a_clients_kernels_fits_beside_the_one_that_serves(registers):
    serve, *others = blocks(registers).values()
    for other in (*others, FILL):
        assert fit([serve, other]), other
    assert not any(fit([AT_FIRST["serve"], AT_FIRST[name]]) for name in ("link_put", "link_wait")), "as it was once"


@pytest.mark.emulator
@pytest.mark.parametrize(
    ("of", "idle_ns", "status"),
    [
        pytest.param(blocks(COMPILED), 2**60, LinkStatus.OK, id="beside"),
        pytest.param(blocks(COMPILED), 3_000, LinkStatus.OK, id="beside-a-kernel-that-comes-again"),
        pytest.param(AT_FIRST, 3_000, LinkStatus.TIMEOUT, id="waiting-for-each-other"),
    ],
)
def test_a_client_and_a_shard_on_one_gpu(of, idle_ns, status):
    """A kernel that serves cannot come again beside a wait for its answer that leaves it no room."""
    world = World(1, gpu_world.load())
    world.limit(GRID, lambda kernel: next(block for name, block in of.items() if kernel.startswith(name)))
    shard = Shard(world, random.Random(1), idle_ns)
    shard.launch()
    client, body = GpuClient(world, shard, 0, {}), BODIES[0]
    client.device, handle = DEVICE, shard.begin(0, 0)
    shard.finish(handle)

    def step():
        client.fill(body, (handle, handle))
        client.seq += 1
        waited = client.launch("link_wait", address(client.sent), after=client.launch_put(body))
        yield from client.ended(client.launch_add(body, after=waited))

    drive(world, shard, [client.join()], [], shard.random)
    client.state["budget_ns"] = 400_000
    for _ in range(3):
        drive(world, shard, [step()], [], shard.random)
        assert client.state["status"] == status
