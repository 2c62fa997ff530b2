"""Blocks beside each other on a multiprocessor, and that a client's find room beside one that serves."""

from __future__ import annotations

import itertools

import pytest

from bench import gpu_build
from bench.gpu_build import HOPPER, SERVE_SHARED_BYTES, Job, Usage
from kernels_cuda.heuristics import choose
from kernels_cuda.residency import LANES, PARTITION_REGISTERS, PARTITIONS, SERVE_WARPS, Block, fit, most_registers
from lora_server.transport.gpu.cuda import SERVE_OWN_BYTES

NINE_WARPS = Block(9, 160)  # as the kernel that serves was, once
SERVE, LINK = Job("serve.cu", HOPPER), Job("link.cu", HOPPER)


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
        for beside in (NINE_WARPS, Block(8, 162)):
            blocks = [beside, Block(warps, registers)]
            assert fit(blocks) == fit_by_dealing(blocks), blocks


def test_nine_warps_of_160_registers_leave_16_to_a_block_of_eight():
    assert most_registers(NINE_WARPS, 8) == 16
    assert not fit([NINE_WARPS, Block(8, 20)]), "a wait of eight warps, that has 20"
    assert fit([NINE_WARPS, Block(1, 32)])
    assert most_registers(Block(SERVE_WARPS + 1, 162), 8) == 88
    assert not fit([Block(8, 32, 120 << 10)] * 2), "shared memory"


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
