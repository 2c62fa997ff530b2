"""Sockets: bound so that others find them, and watched so that a host that is gone is noticed."""

from __future__ import annotations

import errno
import os
import select
import socket
from collections.abc import Callable
from typing import TypeVar

import tenacity

from lora_server.address import bracketed
from lora_server.errors import ConfigError
from lora_server.ports import ANY_PORT, TcpPort
from lora_server.transport.tls import Stream

BACKLOG = 1024
_T = TypeVar("_T")
SILENT_MS = 5000
TAKEN_SECONDS, RETRY_SECONDS = 3.0, 0.1  # for a process that is ending to give its port up


def listen(host: str, advertise: str = "", port: TcpPort = ANY_PORT) -> tuple[socket.socket, str]:
    """Return a socket that listens at a port of a host, and the address where others reach it.

    Raises ConfigError where a port of --data-port-base cannot be had.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET

    def attempt() -> socket.socket:
        return socket.create_server((host, port.number), family=family, backlog=BACKLOG)

    sock = _patiently(attempt, f"tcp://{bracketed(host)}", port) if port.number else attempt()
    return sock, f"tcp://{bracketed(advertise or host)}:{sock.getsockname()[1]}"


def parse(address: str) -> tuple[str, int]:
    """Return host and port of tcp://HOST:PORT."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return host.strip("[]"), int(port)


def watch(sock: socket.socket) -> None:
    """Send small frames at once, and notice within seconds that the peer's host is gone."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 2)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENT_MS)


def readable(sock: Stream, seconds: float) -> bool:
    """Wait up to `seconds` for data, or the connection's end; return whether there is any."""
    return _polled(sock, select.POLLIN, seconds)


def writable(sock: Stream, seconds: float) -> bool:
    """Wait up to `seconds` until the socket takes more; return whether it does."""
    return _polled(sock, select.POLLOUT, seconds)


def _polled(sock: Stream, event: int, seconds: float) -> bool:
    poller = select.poll()
    poller.register(sock, event)
    return bool(poller.poll(seconds * 1e3))


def _patiently(attempt: Callable[[], _T], where: str, port: TcpPort) -> _T:
    while_taken = tenacity.Retrying(
        retry=tenacity.retry_if_exception(lambda error: getattr(error, "errno", 0) == errno.EADDRINUSE),
        stop=tenacity.stop_after_delay(TAKEN_SECONDS),
        wait=tenacity.wait_fixed(RETRY_SECONDS),
        reraise=True,
    )
    try:
        return while_taken(attempt)
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        raise ConfigError(
            f"--data-port-base: cannot listen at {where}:{port.number} for {port.owner} ({reason}); expected it free: "
            "end what listens there, or choose another base"
        ) from error
