"""Waiting until NVSHMEM's world is complete: every shard and every engine worker has a place in it."""

from __future__ import annotations

import time
from collections.abc import Callable

import structlog

from lora_server.errors import LoraServerError, ServerUnavailableError
from lora_server.wire import lora_server_pb2 as pb

LOOK_SECONDS = 0.1  # between two questions whether all are there
log = structlog.get_logger()


def gathered(place: pb.Place, ask: Callable[[], pb.Place], missing: Callable[[], str], deadline: float) -> pb.Place:
    """Return the lease's place once every process has one; `ask` polls for it, `missing` names what is not there yet.

    Raises ServerUnavailableError at `deadline` (time.monotonic()); the server then gives the place to another client.
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
