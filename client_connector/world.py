"""An engine's process in NVSHMEM's world: it asks for a place, waits until all are there, and enters with them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import structlog
import torch

from lora_server.errors import LoraServerError, ServerUnavailableError
from lora_server.transport.base import Link
from lora_server.transport.gpu.opened import world_gpu_of
from lora_server.transport.gpu.world import World, entered
from lora_server.transport.gpu.world_link import WorldLink
from lora_server.transport.session import Terms
from lora_server.wire import lora_server_pb2 as pb
from lora_server.wire.region import RegionLayout

LOOK_SECONDS = 0.1  # between two looks whether all are there
log = structlog.get_logger()


def wanted() -> pb.Place:
    """What to join with: the place that this process has, if it has one."""
    return entered.place


def check(device: str) -> None:
    """Before joining. Raises ConfigError that names what this machine lacks."""
    world_gpu_of(torch.device(device))


def gathered(place: pb.Place, ask: Callable[[], pb.Place], missing: Callable[[], str], deadline: float) -> pb.Place:
    """The place that a lease has, once all others have theirs, too; until `deadline` (time.monotonic()).

    `ask` tells it as it is now, `missing` who is not there. Raises ServerUnavailableError where not all come in time,
    which gives the place to the next who asks.
    """
    if not place.uid:
        log.info(
            "waiting for NVSHMEM's world", pe=place.rank, pes=place.size, seconds=round(deadline - time.monotonic())
        )
    while not place.uid:
        if time.monotonic() > deadline:
            raise ServerUnavailableError(
                f"NVSHMEM: not all {place.size} PEs of the world came in time ({_said(missing)}); start as many engine "
                "processes as --nvshmem-clients says, one per worker, or wait longer (timeout_seconds; vLLM: "
                "LORA_SERVER_WORLD_SECONDS)"
            )
        time.sleep(LOOK_SECONDS)
        place = ask()
    return place


def _said(missing: Callable[[], str]) -> str:
    try:
        return missing()
    except LoraServerError as error:
        return str(error)


def enter(place: pb.Place, terms: Terms, device: str) -> World:
    """With all others, or stay in it. Raises WorldError."""
    layout = RegionLayout.for_model(terms.spec, terms.max_step_rows, place.slots, terms.wire)
    return entered.enter(World(world_gpu_of(torch.device(device)), place, terms.layout.num_shards, layout))


def links(world: World, lease: pb.Lease, is_served: Callable[[], bool]) -> Iterator[Link]:
    """To every shard."""
    for shard in range(world.heap.shards):
        yield WorldLink(world, lease.client, lease.epoch, shard, is_served)
