"""Binding ZeroMQ sockets so that others find them."""

from __future__ import annotations

import zmq

from lora_server.address import bracketed


def bind(sock: zmq.Socket[bytes], host: str, advertise: str = "") -> str:
    """Bind to a free port of a host (name, IPv4 or IPv6 address); returns where others reach it."""
    sock.setsockopt(zmq.IPV6, int(":" in host))
    port = sock.bind_to_random_port(f"tcp://{bracketed(host)}")
    return f"tcp://{bracketed(advertise or host)}:{port}"
