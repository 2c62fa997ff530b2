"""Reserves a node's ports while the process that serves there is restarted.

The node binds a port and does not listen. Until it closes it, the kernel gives the port to no other user, and to this
user's processes only with SO_REUSEPORT: so the controller's successor finds it free, and no other process can pose as
the controller meanwhile. (gRPC takes no socket that was bound for it.)
"""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Mapping

from lora_server.address import ANY, Address, why_not
from lora_server.errors import ConfigError

_NOT_HERE = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
_TRIES = 16  # of ports that are free at the first address, and may be taken at another


def hold_port(flag: str, address: Address, stack: contextlib.ExitStack) -> Address:
    """Bind one port at every address of a host until `stack` ends; return the address, with the chosen port if it is 0.

    Raises ConfigError where another process has it.
    """
    tries = 1 if address.port else _TRIES
    try:
        found = socket.getaddrinfo(address.host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        hosts = {str(place[0]): family for family, *_, place in found}
        if address.host in ANY:  # gRPC listens at all addresses of both kinds
            hosts = {"0.0.0.0": socket.AF_INET, "::": socket.AF_INET6}
        while True:
            tries -= 1
            try:
                with contextlib.ExitStack() as held:
                    port = _hold_all(hosts, address, held)
                    stack.push(held.pop_all())
                return address._replace(port=port)
            except OSError as error:
                if error.errno != errno.EADDRINUSE or not tries:
                    raise
    except OSError as error:
        raise cannot_listen(flag, address, error) from error


def _hold_all(hosts: Mapping[str, int], address: Address, stack: contextlib.ExitStack) -> int:
    """Bind one port at those of these hosts that this machine has; return the port. Raises OSError."""
    port, failure = address.port, OSError(f"{address.host} stands for no address")
    here = False
    for host, family in hosts.items():
        try:
            port = stack.enter_context(_hold(family, host, port)).getsockname()[1]
            here = True
        except OSError as error:
            if error.errno not in _NOT_HERE:
                raise
            failure = error
    if not here:
        raise failure
    return port


def cannot_listen(flag: str, address: Address, error: OSError) -> ConfigError:
    """Return the error of a process that cannot listen at an address; where another does, with a free port."""
    if error.errno == errno.EADDRINUSE:
        from lora_server.doctor.network import listener

        return ConfigError(
            f"{flag} {address}: cannot listen there, in use by {listener(address.port) or 'another process'}; end it, "
            f"or give a port that is free, such as {_free_after(address)}"
        )
    return ConfigError(
        f"{flag} {address}: cannot listen there ({why_not(error)}); expected a name or an address of this host, such "
        "as 127.0.0.1, or 0.0.0.0 for all of them"
    )


def _free_after(address: Address) -> Address:
    """Return the next address of the host at which a process could listen now; port 0 if there is none."""
    for port in range(address.port + 1, min(address.port + 100, 65536)):
        with contextlib.suppress(OSError):
            address._replace(port=port).listen(1).close()
            return address._replace(port=port)
    return address._replace(port=0)


def _hold(family: int, host: str, port: int) -> socket.socket:
    held = socket.socket(family, socket.SOCK_STREAM)
    try:
        if family == socket.AF_INET6:
            held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        if port:  # connections of an earlier server may linger; but no other socket may listen, or be about to
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind((host, port))
        if port:
            held.listen(1)
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
            held.shutdown(socket.SHUT_RDWR)  # bound it stays
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    except OSError:
        held.close()
        raise
    return held
