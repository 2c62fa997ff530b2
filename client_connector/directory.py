"""The server's list of adapters, for engines that resolve names. Blocking calls; thread-safe."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from client_connector.reconnect import while_busy
from lora_server.errors import ConfigError, LoraServerError, UnauthenticatedError
from lora_server.timings import DEFAULTS, Timings
from lora_server.wire import bounds
from lora_server.wire import lora_server_pb2 as pb
from lora_server.wire import lora_server_pb2_grpc as rpc
from lora_server.wire.credentials import Credentials, of_environment
from lora_server.wire.listing import all_pages
from lora_server.wire.rpc import call, open_channel

ADD_SECONDS, BRING_SECONDS, READY_SECONDS = 120.0, 120.0, 0.5


class AdapterDirectory:
    """Adapters of the server at HOST:PORT. Needs no lease. Without credentials it shows those of the environment."""

    def __init__(self, address: str, credentials: Credentials | None = None, timings: Timings = DEFAULTS) -> None:
        self._address, self._credentials, self._seconds = address, credentials, timings.call
        self._while_busy = while_busy(BRING_SECONDS)
        self._channel = open_channel(address, credentials)
        self._adapters = rpc.AdaptersStub(self._channel)
        self._access = rpc.AccessStub(self._channel)

    def _call(self, method: Any, request: Any, seconds: float | None = None) -> Any:
        return call(method, request, server=self._address, seconds=self._seconds if seconds is None else seconds)

    def get(self, name: str, on_behalf_of: str = "") -> pb.Adapter:
        """Look up an adapter by a tenant's name for it; waits while the server fetches it.

        Raises UnknownAdapterError with the reason, ServerUnavailableError.
        """
        request = pb.GetAdapterRequest(name=name, on_behalf_of=on_behalf_of)
        found: pb.Adapter = self._while_busy(self._call, self._adapters.Get, request)
        return found

    def list(self, on_behalf_of: str = "") -> list[pb.Adapter]:
        """List all adapters, or those that a tenant sees, by name. Raises ServerUnavailableError."""

        def ask(request: pb.ListAdaptersRequest) -> pb.ListAdaptersReply:
            request.on_behalf_of = on_behalf_of
            reply: pb.ListAdaptersReply = self._call(self._adapters.List, request)
            return reply

        return list(all_pages(ask).adapters)

    def who(self, token: str) -> pb.Caller:
        """Look up the owner of a token. Raises UnauthenticatedError, ServerUnavailableError."""
        own = of_environment() if self._credentials is None else self._credentials
        try:
            shown = replace(own, token=token, token_file=None).authorization("Access/WhoIs").removeprefix("Bearer ")
        except ConfigError as error:
            raise UnauthenticatedError(str(error)) from None
        if not bounds.fits(shown):
            raise UnauthenticatedError(f"got {len(shown)} characters, expected a token, ls_ID_SECRET")
        caller: pb.Caller = self._call(self._access.WhoIs, pb.WhoIsRequest(token=shown))
        return caller

    def add(self, name: str, uri: str) -> pb.Adapter:
        """Validate an adapter and load it on every shard, unless it is there; raises AdapterError."""
        request = pb.AddAdapterRequest(name=name, uri=uri, wait_seconds=ADD_SECONDS)
        added: pb.Adapter = self._call(self._adapters.Add, request, ADD_SECONDS + self._seconds)
        return added

    def remove(self, name: str) -> None:
        """Unlist an adapter; its weights are freed with the last release."""
        self._call(self._adapters.Remove, pb.RemoveAdapterRequest(name=name))

    def status(self) -> pb.StatusReply:
        """Ask for the server's status, with its refused adapters. Raises ServerUnavailableError."""
        reply: pb.StatusReply = self._call(rpc.ServerStub(self._channel).Status, pb.StatusRequest())
        return reply

    def ready(self) -> bool:
        """Return whether the server answers at once, with all shards up.

        Opens a connection of its own: an older one reports an outage for a moment longer.
        """
        channel = open_channel(self._address, self._credentials, apart=True)
        try:
            return bool(self._call(rpc.ServerStub(channel).Status, pb.StatusRequest(), READY_SECONDS).ready)
        except LoraServerError:
            return False
        finally:
            channel.close()

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()


def as_uri(path: str) -> str:
    """Return where an adapter is that an engine's API names by a path: absolute, as the server's folder is another."""
    return path if "://" in path else str(Path(os.path.expanduser(path)).absolute())  # noqa: PTH111  (never raises)
