"""Which backend a client uses to reach a shard."""

from __future__ import annotations

from pathlib import Path

from lora_server.errors import ConfigError
from lora_server.transport.base import Link
from lora_server.transport.shm import ShmLink
from lora_server.transport.zmq import ZmqLink
from lora_server.wire import lora_server_pb2 as pb
from lora_server.wire.host import host_identity
from lora_server.wire.messages import Hello

TRANSPORTS = ("auto", "shm", "zmq")


def check_transport(name: str) -> str:
    """Raises ConfigError for a name that is not one of TRANSPORTS."""
    if name not in TRANSPORTS:
        raise ConfigError(f"transport: got {name!r}, expected one of {', '.join(TRANSPORTS)}")
    return name


def connect(endpoint: pb.Endpoint, hello: Hello, transport: str) -> Link:
    """A link to one shard; `auto` takes shared memory where the shard is on this host.

    Raises ShardUnavailableError, LeaseError, and ConfigError if shared memory is asked for and not offered.
    """
    if transport == "shm" and not endpoint.shm:
        raise ConfigError(f"transport shm: shard {endpoint.shard} does not offer it (its CPU is not x86-64); use zmq")
    near = endpoint.shm != "" and endpoint.host == host_identity() and Path(endpoint.shm).exists()
    if transport == "shm" or (transport == "auto" and near):
        return ShmLink(endpoint.shm, hello, endpoint.shard)
    return ZmqLink(endpoint.zmq, hello, endpoint.shard)
