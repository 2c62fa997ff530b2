"""Chooses and opens the backend by which a client reaches a shard."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Literal, cast, get_args

import structlog

from lora_server.errors import ConfigError, LoraServerError, ServerUnavailableError
from lora_server.timings import DEFAULTS, Timings
from lora_server.transport.base import Link
from lora_server.transport.shm import ShmLink
from lora_server.transport.tcp import TcpLink
from lora_server.wire import lora_server_pb2 as pb
from lora_server.wire.host import host_identity
from lora_server.wire.messages import Hello
from lora_server.wire.slot import Wire
from lora_server.wire.terms import Terms

log = structlog.get_logger()
WIRES = ("any", *get_args(Wire))
TRANSPORTS = ("auto", "gpu", "nvshmem", "cuda_ipc", "shm", "tcp")
FAR = "on another host"


def check_transport(name: str) -> str:
    """Return the transport of a name; raises ConfigError if it is none of TRANSPORTS."""
    if name == "zmq":
        log.warning("transport zmq is tcp now")
        return "tcp"
    if name not in TRANSPORTS:
        raise ConfigError(f"transport: got {name!r}, expected one of {', '.join(TRANSPORTS)}")
    return name


def check_wire(name: str) -> str:
    """Return the name of a wire; raises ConfigError if it is none of WIRES."""
    if name not in WIRES:
        raise ConfigError(f"wire: got {name!r}, expected one of {', '.join(WIRES)}")
    return name


def agreed_wire(served: str, wanted: str) -> Wire:
    """Return the server's wire if the engine takes it; raises ConfigError if not. An empty one is exact."""
    served = served or "exact"
    if served in get_args(Wire) and wanted in ("any", served):
        return cast(Wire, served)
    raise ConfigError(
        f"wire: the server's is {served}, the engine takes {wanted} of {', '.join(get_args(Wire))}; start the server "
        "with another --wire, or give the engine wire='any'"
    )


def why_far(endpoint: pb.Endpoint) -> str:
    """Return why a shard cannot be reached by shared memory; empty if it can."""
    if endpoint.host != host_identity():
        return FAR
    if not endpoint.shm:
        return "the shard offers no shared memory: its CPU is not x86-64"
    try:
        Path(endpoint.shm).stat()
    except PermissionError:
        return (
            f"on this host, but {Path(endpoint.shm).parent} is another user's: run engine and server as one user to "
            "use shared memory"
        )
    except OSError:
        if Path(endpoint.shm).parent.is_dir():
            return ""  # the shard ended: connecting to it says so
        return (
            f"on this host, but {Path(endpoint.shm).parent} cannot be seen from here: give both containers the "
            "server's --data-dir"
        )
    return ""


def tell_far(endpoints: Iterable[pb.Endpoint]) -> None:
    """Log each reason for which `auto` falls back to TCP, which is slower."""
    shards: dict[tuple[str, bool], list[int]] = {}
    for endpoint in endpoints:
        shards.setdefault((why_far(endpoint), bool(endpoint.certificate)), []).append(endpoint.shard)
    for (reason, encrypted), far in shards.items():
        if reason:
            level = log.info if reason == FAR else log.warning
            level("activations go over TCP", shards=far, encrypted=encrypted, reason=reason)


def connect(
    endpoint: pb.Endpoint,
    hello: Hello,
    transport: str,
    device: str = "cpu",
    seconds: float = Timings.handshake,
    timings: Timings = DEFAULTS,
) -> Link:
    """Open a link to one shard, within `seconds`, for activations on `device`.

    `auto` takes shared memory where the shard is on this host, and rows in GPU memory where both compute on
    GPUs. Raises ShardUnavailableError, LeaseError, and ConfigError for a transport that the shard does not offer.
    """
    gpu = device.startswith("cuda")
    if transport == "gpu":
        return _kernel_link(endpoint, hello, device)
    if transport == "cuda_ipc":
        if not (endpoint.device == "cuda" and gpu):
            raise ConfigError(
                f"transport cuda_ipc: shard {endpoint.shard} computes on {endpoint.device or 'cpu'}, the engine on "
                f"{device}; expected both on GPUs of one host; use auto"
            )
        return _gpu_link(endpoint, hello, device, "must")
    if transport == "shm" and not endpoint.shm:
        raise ConfigError(f"transport shm: shard {endpoint.shard} does not offer it (its CPU is not x86-64); use tcp")
    if not (transport == "shm" or (transport == "auto" and not why_far(endpoint))):
        return TcpLink(endpoint.tcp, hello, endpoint.shard, seconds, endpoint.certificate)
    if gpu:
        try:
            return _gpu_link(endpoint, hello, device, "may" if transport == "auto" else "no")
        except ConfigError as error:
            log.warning("activations are copied by the host", shard=endpoint.shard, reason=str(error))
    return ShmLink(endpoint.shm, hello, endpoint.shard, seconds, timings.region_keep)


def place_in_world(device: str) -> pb.Place:
    """Return this process's place in NVSHMEM's world, empty before it has one: what to join with.

    Raises ConfigError that names what this machine lacks.
    """
    from lora_server.device.client import links

    return links.place_in_world(device)


def connect_world(place: pb.Place, terms: Terms, device: str, is_served: Callable[[], bool]) -> list[Link]:
    """Enter NVSHMEM's world with all other processes, unless this one is in it, and return a link to every shard.

    Raises WorldError.
    """
    from lora_server.device.client import links

    return links.open_world(place, terms, device, is_served)


def _kernel_link(endpoint: pb.Endpoint, hello: Hello, device: str) -> Link:
    """Imported only where it is used."""
    far = why_far(endpoint)
    if far:
        raise ConfigError(f"transport gpu: shard {endpoint.shard} is {far}; expected it on this host; use auto")
    from lora_server.device.client import links

    return links.open_gpu(endpoint.shm, hello, endpoint.shard, device)


def _gpu_link(endpoint: pb.Endpoint, hello: Hello, device: str, mirror: Literal["must", "may", "no"]) -> Link:
    """Imported only where it is used: it needs CuPy."""
    try:
        from lora_server.device.client import links

        return links.open_cuda_ipc(endpoint.shm, hello, endpoint.shard, device, mirror)
    except LoraServerError:
        raise
    except Exception as error:  # no CuPy, one that is too old, a driver that refuses: there are many ways
        raise ConfigError(
            f"transport cuda_ipc: {type(error).__name__}: {error}; "
            "pip install '.[cuda]' in a checkout of lora-server, or use shm"
        ) from error


LOOK_SECONDS = 0.1  # between two questions whether all are there


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
