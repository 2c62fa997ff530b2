"""One PE of a world in which the last PE sends a step to the first: nvshmem_pe RANK SIZE, on GPU RANK.

The first PE writes the unique id to stdout; all read it from stdin. The first says `came` when all bytes did.
"""

from __future__ import annotations

import os
import sys
import time

import torch

from lora_server.device.client.ends import WorldEnds
from lora_server.device.client.link import KernelLink
from lora_server.device.nvshmem.world import World, WorldGpu
from lora_server.wire import lora_server_pb2 as pb
from lora_server.wire import slot
from lora_server.wire.region import PAGE_BYTES, RegionLayout
from lora_server.wire.slot import RequestHeader

SECONDS = 60.0
LAYOUT = RegionLayout(2, 16 * PAGE_BYTES, 16 * PAGE_BYTES, PAGE_BYTES)
EPOCH, CLIENT, SEQ, PAYLOAD = 5, 7, 3, 3 * PAGE_BYTES


def request() -> bytes:
    memory = bytearray(slot.HEADER_BYTES)
    counts = (1, 1, 1, 1, 0, 8)
    header = RequestHeader(0, 0, CLIENT, EPOCH, SEQ, 1, 0, 0, 1, *counts, ((0, 8),), PAYLOAD, 10**6, 0)
    header.pack_into(memoryview(memory))
    return bytes(memory) + bytes(i % 251 for i in range(PAYLOAD))


def play(gpu: WorldGpu, rank: int, size: int, uid: bytes) -> str:
    """Send or await the step; return its outcome as this PE sees it."""
    world = World(gpu, pb.Place(world=1, rank=rank, size=size, uid=uid, slots=LAYOUT.depth), 1, LAYOUT)
    world.enter(SECONDS)
    sizes = world.heap.sizes
    if rank == size - 1:
        link = KernelLink(gpu, WorldEnds(world, CLIENT, EPOCH, 0, lambda: True))
        gpu.write(world.link(0)[0].address + sizes.request_at(SEQ), request())
        link.queue.launch("link_send", link.state.address, SEQ)
        deadline = time.monotonic() + SECONDS
        while not link.queue.is_idle():
            assert time.monotonic() < deadline, "the put does not end"
        link.close()
        if rank:
            return "sent"
    return came(gpu, world.link(size - 1 - rank)[0].address, sizes.request_at(SEQ))


def came(gpu: WorldGpu, address: int, at: int) -> str:
    deadline, expected = time.monotonic() + SECONDS, slot.signal(EPOCH, SEQ).to_bytes(8, "little")
    while gpu.read(address, 8) != expected:
        assert time.monotonic() < deadline, "no signal"
    wanted = request()
    return "came" if gpu.read(address + at, len(wanted)) == wanted else "other bytes"


def main() -> None:
    from lora_server.device.nvshmem.library import open_nvshmem

    rank, size = int(sys.argv[1]), int(sys.argv[2])
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    gpu = open_nvshmem(device)
    if rank == 0:
        print(gpu.new_uid().hex(), flush=True)
    print(play(gpu, rank, size, bytes.fromhex(sys.stdin.readline())), flush=True)
    sys.stdin.readline()
    os._exit(0)


if __name__ == "__main__":
    main()
