"""HOST:PORT. Leaf module: stdlib only."""

from __future__ import annotations

from typing import NamedTuple

from lora_server.errors import ConfigError

_ANY = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}


class Address(NamedTuple):
    """Where somebody listens. `host` is a name, or an IPv4 or IPv6 address without brackets."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str, what: str = "address") -> Address:
        """From HOST:PORT; raises ConfigError that names `what`."""
        host, _, port = text.rpartition(":")
        if not host or not port.isdigit() or int(port) > 65535:
            raise ConfigError(f"{what}: got {text!r}, expected HOST:PORT such as 127.0.0.1:7400")
        return cls(host.strip("[]"), int(port))

    def local(self) -> Address:
        """How processes of the same host reach it."""
        return self._replace(host=_ANY.get(self.host, self.host))

    def __str__(self) -> str:
        return f"{bracketed(self.host)}:{self.port}"


def bracketed(host: str) -> str:
    """A host as it stands in an address: IPv6 goes in brackets."""
    return f"[{host}]" if ":" in host else host
