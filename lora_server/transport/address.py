"""Binding ZeroMQ sockets so that others find them."""

from __future__ import annotations

import zmq


def bind(sock: zmq.Socket[bytes], host: str, advertise: str = "") -> str:
    """Bind to a free port of a host (name, IPv4 or IPv6 address); returns where others reach it."""
    sock.setsockopt(zmq.IPV6, int(":" in host))
    port = sock.bind_to_random_port(f"tcp://{bracketed(host)}")
    return f"tcp://{bracketed(advertise or host)}:{port}"


def bracketed(host: str) -> str:
    """A host as it stands in an address: IPv6 goes in brackets."""
    return f"[{host}]" if ":" in host else host
