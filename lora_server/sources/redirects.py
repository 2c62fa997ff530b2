"""HTTP for fsspec: checks every redirect, and connects to the very address that was checked.

`Allowed` checks the URL that a caller names. A redirect's target has to be listed (--allow-source), or public where
there is no list. It is never a link-local address, where clouds serve credentials.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from lora_server.adapters.refusal import clip
from lora_server.errors import AdapterSourceError
from lora_server.sources.urls import is_listed

if TYPE_CHECKING:
    import aiohttp

SILENCE_SECONDS = 30.0  # without a byte from the server
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_METADATA = tuple(map(ipaddress.IPv6Address, ("fd00:ec2::254", "fd20:ce::254")))  # of AWS and Google; not link-local
_Address: TypeAlias = "ipaddress.IPv4Address | ipaddress.IPv6Address"


class RedirectPolicy:
    """Checks the requests of one fetch in turn. `followed`: whether one was redirected; `refused`: why one was not
    sent, since aiohttp and fsspec wrap errors that are raised in them."""

    def __init__(self, listed: Sequence[str] = ()) -> None:
        """`listed`: URLs that targets have to be below; empty: targets have to be public."""
        self.followed = False
        self.refused: AdapterSourceError | None = None
        self._listed, self._redirected = listed, False

    async def session(self, **_: Any) -> aiohttp.ClientSession:
        """Open a session on fsspec's event loop. It keeps no connection, so that each request is checked."""
        import aiohttp

        trace = aiohttp.TraceConfig()
        trace.on_request_start.append(self._begin)
        trace.on_request_redirect.append(self._redirect)
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(force_close=True, socket_factory=self._socket),
            middlewares=(self._check,),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=SILENCE_SECONDS, sock_read=SILENCE_SECONDS),
            trace_configs=[trace],
        )

    async def _begin(self, *_: object) -> None:
        self._redirected = False

    async def _redirect(self, *_: object) -> None:
        self.followed = self._redirected = True

    async def _check(self, request: aiohttp.ClientRequest, send: aiohttp.ClientHandlerType) -> aiohttp.ClientResponse:
        """Check the URL of each request, redirects included, before it is sent."""
        if self._redirected and self._listed:
            url = request.url.with_query(None).with_fragment(None)
            if not is_listed(str(url), self._listed):
                raise self._refusal(str(url.origin()), f"expected a URL below {', '.join(self._listed)}")
        return await send(request)

    def _socket(self, info: aiohttp.AddrInfoType) -> socket.socket:
        """Open a socket for this address, if it may be connected to."""
        family, kind, protocol, _, (address, *_rest) = info
        if self._redirected:
            reached = _reached(str(address))
            if reached.is_link_local or reached in _METADATA:
                raise self._refusal(str(address), "link-local addresses and metadata services are never followed")
            if not self._listed and (reached.is_multicast or not reached.is_global):
                raise self._refusal(str(address), "expected a public address")
        return socket.socket(family, kind, protocol)

    def _refusal(self, target: str, why: str) -> OSError:
        self.refused = AdapterSourceError(
            f"it redirects to {clip(target)}: {why}; name the address that it leads to, or list it with --allow-source"
        )
        return OSError(str(self.refused))  # aiohttp may try other addresses of the name


def _reached(text: str) -> _Address:
    """Return the address that a packet to `text` reaches: an IPv6 address may contain an IPv4 one."""
    address = ipaddress.ip_address(text)
    if isinstance(address, ipaddress.IPv4Address):
        return address
    inside = address.ipv4_mapped or address.sixtofour
    if address in _NAT64:
        inside = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return inside or address
