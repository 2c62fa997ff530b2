"""Opens an engine's links to shards, by the name of the engine's device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch

from lora_server.device.client.cuda_ipc import CudaPuts, IpcLink
from lora_server.device.client.ends import HostEnds, WorldEnds
from lora_server.device.client.link import KernelLink
from lora_server.device.nvshmem.opened import world_gpu_of
from lora_server.device.nvshmem.world import World, entered
from lora_server.device.protocol.opened import gpu_of
from lora_server.transport.base import Link
from lora_server.wire import lora_server_pb2 as pb
from lora_server.wire.messages import Hello
from lora_server.wire.region import RegionLayout
from lora_server.wire.terms import Terms


def open_gpu(address: str, hello: Hello, shard: int, device: str) -> Link:
    """Return a link to a shard of this host that a kernel serves. Raises ConfigError, ShardUnavailableError."""
    gpu = gpu_of(torch.device(device))
    return KernelLink(gpu, HostEnds(address, hello, shard, gpu))


def open_cuda_ipc(address: str, hello: Hello, shard: int, device: str, mirror: Literal["must", "may", "no"]) -> Link:
    """Return a link to a shard of this host that its host serves; `mirror`: see IpcLink. Raises as CuPy does."""
    index = torch.device(device).index
    puts = CudaPuts(torch.device("cuda", torch.cuda.current_device() if index is None else index))
    with torch.cuda.stream(puts.stream):  # what the link makes is there before its first step is
        return IpcLink(address, hello, shard, puts, mirror)


def place_in_world(device: str) -> pb.Place:
    """Return this process's place in NVSHMEM's world, empty before it has one.

    Raises ConfigError that names what this machine lacks.
    """
    world_gpu_of(torch.device(device))
    return entered.place


def open_world(place: pb.Place, terms: Terms, device: str, is_served: Callable[[], bool]) -> list[Link]:
    """Enter the world, unless this process is in it, and return a link to every shard. Raises WorldError."""
    layout = RegionLayout.for_model(terms.spec, terms.max_step_rows, place.slots, terms.wire)
    shards = terms.layout.num_shards
    world = entered.enter(World(world_gpu_of(torch.device(device)), place, shards, layout))
    ends = [WorldEnds(world, terms.client, terms.epoch, shard, is_served) for shard in range(shards)]
    return [KernelLink(world.gpu, one) for one in ends]
