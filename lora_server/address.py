"""HOST:PORT. Leaf module: stdlib only."""

from __future__ import annotations

import ipaddress
import re
import socket
from typing import NamedTuple

from lora_server.errors import ConfigError

ANY = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}
_HOST_PORT = re.compile(r"(\[[^\[\]\s/]+\]|[^\[\]\s/]+):([0-9]{1,5})")
_NAME = re.compile(r"([\w-]+\.)*(?![0-9]+$)[\w-]+", re.ASCII)  # a last part of digits alone is a mistyped address


class Address(NamedTuple):
    """An address to listen at. `host` is a name, or an IPv4 or IPv6 address without brackets."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """Return the address of a HOST:PORT; raises ConfigError."""
        match = _HOST_PORT.fullmatch(text)
        if match is None or int(match[2]) > 65535:
            raise ConfigError(f"got {text!r}, expected HOST:PORT such as 127.0.0.1:7400, a port up to 65535")
        return cls(match[1].strip("[]"), int(match[2]))

    def local(self) -> Address:
        """Return the address at which processes of the same host reach it."""
        return self._replace(host=ANY.get(self.host, self.host))

    def is_loopback(self) -> bool:
        """Return whether only processes of this host reach it."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    def meets(self, other: Address) -> bool:
        """Return whether two processes cannot listen at both; names are compared as text."""
        return 0 < self.port == other.port and (self.host == other.host or bool({self.host, other.host} & set(ANY)))

    def listen(self, backlog: int, *, held: bool = False) -> socket.socket:
        """Listen there. `held`: a socket of this user that does not listen already holds the port. Raises OSError."""
        family, *_, place = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[
            0
        ]
        return socket.create_server(place[:2], family=family, backlog=backlog, reuse_port=held)

    def __str__(self) -> str:
        return f"{bracketed(self.host)}:{self.port}"


def why_not(error: OSError) -> str:
    """Return why no process can listen somewhere, without the address, which `socket.create_server` repeats."""
    return (error.strerror or str(error)).partition(" (while")[0]


class ControllerList(NamedTuple):
    """The addresses of a server's controllers: of its only one, or also of its standby."""

    addresses: tuple[Address, ...]

    @classmethod
    def parse(cls, text: str) -> ControllerList:
        """Return the addresses of HOST:PORT, or of several with commas between them; raises ConfigError."""
        addresses = tuple(Address.parse(one) for one in text.split(","))
        if len(set(addresses)) < len(addresses):
            raise ConfigError(f"got {text!r}, expected each address once")
        return cls(addresses)

    @property
    def has_standby(self) -> bool:
        """Return whether there is more than one controller."""
        return len(self.addresses) > 1

    def is_loopback(self) -> bool:
        """Return whether only processes of this host reach them."""
        return all(address.is_loopback() for address in self.addresses)

    def __str__(self) -> str:
        return ",".join(map(str, self.addresses))


def bracketed(host: str) -> str:
    """Return a host as it is written in an address: IPv6 in brackets."""
    return f"[{host}]" if ":" in host else host


def parse_host(text: str) -> str:
    """Return a name or an IP address without brackets; raises ConfigError for any other text."""
    host = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    try:
        known = not ipaddress.ip_address(host).is_unspecified
    except ValueError:
        known = _NAME.fullmatch(host) is not None
    if not known:
        raise ConfigError(f"got {text!r}, expected the name or address of one host, without a port")
    return host
