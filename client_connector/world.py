"""An engine's process in NVSHMEM's world: it asks for a place, waits until all are there, and enters with them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch

from lora_server.errors import ConfigError, ServerUnavailableError
from lora_server.spec import ModelSpec
from lora_server.transport.base import Link
from lora_server.transport.gpu.opened import world_gpu_of
from lora_server.transport.gpu.world import World, entered
from lora_server.transport.gpu.world_link import WorldLink
from lora_server.wire import lora_server_pb2 as pb
from lora_server.wire.region import RegionLayout

LOOK_SECONDS = 0.1  # between two looks whether all are there


def wanted() -> pb.Place:
    """What to join with: the place that this process has, if it has one."""
    return entered.place


def check(device: str, wire: str) -> None:
    """Before joining. Raises ConfigError that names what this machine lacks, or what does not go together."""
    world_gpu_of(torch.device(device))
    if wire not in ("exact", "any"):
        raise ConfigError(f"transport nvshmem: got wire {wire}, expected exact; use auto or tcp")


def enter(
    lease: pb.Lease, spec: ModelSpec, shards: int, device: str, ask: Callable[[], pb.Place], deadline: float
) -> World:
    """`ask` tells the place as it is now. Raises ServerUnavailableError where not all come in time, WorldError."""
    place = lease.place
    while not place.uid:
        if time.monotonic() > deadline:
            raise ServerUnavailableError(
                f"NVSHMEM: not all {place.size} PEs of the world came in time ({shards} shards, and as many engines as "
                "--nvshmem-clients says); start them, or wait longer (timeout_seconds)"
            )
        time.sleep(LOOK_SECONDS)
        place = ask()
    layout = RegionLayout.for_model(spec, lease.max_step_rows, place.slots, "exact")
    return entered.enter(World(world_gpu_of(torch.device(device)), place, shards, layout))


def links(world: World, lease: pb.Lease, is_served: Callable[[], bool]) -> Iterator[Link]:
    """To every shard."""
    for shard in range(world.heap.shards):
        yield WorldLink(world, lease.client, lease.epoch, shard, is_served)
