"""ZeroMQ sockets: bound so that others find them, and watched so that a host that is gone is noticed."""

from __future__ import annotations

import errno
import os

import tenacity
import zmq

from lora_server.address import bracketed
from lora_server.errors import ConfigError
from lora_server.ports import ANY_PORT, TcpPort

HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS = 1000, 5000
TAKEN_SECONDS, RETRY_SECONDS = 3.0, 0.1  # for a process that is ending to give its port up


def bind(sock: zmq.Socket[bytes], host: str, advertise: str = "", port: TcpPort = ANY_PORT) -> str:
    """Bind to a port of a host (name, IPv4 or IPv6 address); returns where others reach it.

    Raises ConfigError where a port of --data-port-base cannot be had.
    """
    sock.setsockopt(zmq.IPV6, int(":" in host))
    where = f"tcp://{bracketed(host)}"
    number = port.number or sock.bind_to_random_port(where)
    if port.number:
        _bind_fixed(sock, where, port)
    return f"tcp://{bracketed(advertise or host)}:{number}"


def heartbeat(sock: zmq.Socket[bytes]) -> None:
    """Before it connects or binds: a silent peer is given up and connected to anew, be it at the same address."""
    sock.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    sock.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
    sock.setsockopt(zmq.HEARTBEAT_TTL, HEARTBEAT_TIMEOUT_MS)


def _bind_fixed(sock: zmq.Socket[bytes], where: str, port: TcpPort) -> None:
    while_taken = tenacity.Retrying(
        retry=tenacity.retry_if_exception(_is_taken),
        stop=tenacity.stop_after_delay(TAKEN_SECONDS),
        wait=tenacity.wait_fixed(RETRY_SECONDS),
        reraise=True,
    )
    try:
        while_taken(sock.bind, f"{where}:{port.number}")
    except zmq.ZMQError as error:
        reason = os.strerror(error.errno or 0)
        raise ConfigError(
            f"--data-port-base: cannot listen at {where}:{port.number} for {port.owner} ({reason}); expected it free: "
            "end what listens there, or choose another base"
        ) from error


def _is_taken(error: BaseException) -> bool:
    return isinstance(error, zmq.ZMQError) and error.errno == errno.EADDRINUSE
