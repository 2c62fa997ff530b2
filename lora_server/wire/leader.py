"""A channel to a server that has a standby: its calls go to the controller that leads.

It begins at the address where this process last found the leader. A call that no controller has begun, since a standby
refused it or there was no connection, is made again at the next address at once, unless it is a future or a stream. Any
other failure is the caller's, as with one controller, and later calls go to the next address.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import grpc

from lora_server.address import ControllerList
from lora_server.errors import NotLeaderError
from lora_server.wire.credentials import CODE_KEY

_SILENT = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)
_leaders: dict[str, int] = {}  # by list of addresses: the index of the one that led when it was last called


def leader_of(addresses: str) -> str:
    """Return the one of several addresses, with commas between them, at which this process last found the leader."""
    return addresses.split(",")[_leaders.get(addresses, 0)]


def leave(addresses: str, address: str) -> None:
    """Let later calls go to the next of several addresses, if they go to this one, where nothing answered in time."""
    if leader_of(addresses) == address:
        given = addresses.split(",")
        _leaders[addresses] = (given.index(address) + 1) % len(given)


class LeaderChannel:
    """The part of grpc.Channel that calls use, over one channel per controller. Thread-safe."""

    def __init__(self, addresses: str, open_one: Callable[[str], grpc.Channel]) -> None:
        """`addresses`: with commas between them. Raises ConfigError."""
        self._addresses = addresses
        self._channels = [open_one(str(address)) for address in ControllerList.parse(addresses).addresses]

    def unary_unary(self, method: str, **more: Any) -> LeaderCall:
        """Return what calls a method at the leader."""
        return LeaderCall(self, [channel.unary_unary(method, **more) for channel in self._channels])

    def unary_stream(self, method: str, **more: Any) -> Callable[..., Any]:
        """Return what begins a call, with a stream of answers, at the leader."""
        return LeaderCall(self, [channel.unary_stream(method, **more) for channel in self._channels]).begin

    def stream_stream(self, method: str, **more: Any) -> Callable[..., Any]:
        """Return what begins a call, with streams both ways, at the leader."""
        return LeaderCall(self, [channel.stream_stream(method, **more) for channel in self._channels]).begin

    @property
    def leader(self) -> int:
        """The index of the address that calls go to."""
        return _leaders.get(self._addresses, 0)

    def note(self, index: int, call: Any) -> None:
        """Let later calls go to the next address if a call at this one failed for lack of a leader."""
        code = _code_of(call)
        lacks = code == NotLeaderError.code or (code is None and call.code() in _SILENT)
        if lacks and index == self.leader:
            _leaders[self._addresses] = (index + 1) % len(self._channels)

    def close(self) -> None:
        """Close the channels. Idempotent."""
        for channel in self._channels:
            channel.close()

    def __enter__(self) -> LeaderChannel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class LeaderCall:
    """One method at every controller; `methods` are in the order of the addresses."""

    def __init__(self, channel: LeaderChannel, methods: Sequence[Any]) -> None:
        self._channel, self._methods = channel, methods

    def __call__(self, request: Any, timeout: float | None = None, **how: Any) -> Any:
        """Make a unary call, within `timeout` seconds for all addresses together."""
        until = None if timeout is None else time.monotonic() + timeout
        for is_last in (*[False] * (len(self._methods) - 1), True):
            index, left = self._channel.leader, None if until is None else max(0.0, until - time.monotonic())
            try:
                return self._methods[index](request, timeout=left, **how)
            except grpc.RpcError as error:
                self._channel.note(index, error)
                if is_last or not _was_not_begun(error):
                    raise
        raise AssertionError("the last attempt returns or raises")

    def future(self, request: Any, **how: Any) -> Any:
        """Begin a unary call at the leader; it is made once."""
        return self._noted(self._channel.leader, lambda method: method.future(request, **how))

    def begin(self, request: Any, **how: Any) -> Any:
        """Begin a call with streams at the leader; it is made once."""
        return self._noted(self._channel.leader, lambda method: method(request, **how))

    def _noted(self, index: int, begin: Callable[[Any], Any]) -> Any:
        call = begin(self._methods[index])

        def ended(_: object) -> None:
            if not call.cancelled():  # by this process
                self._channel.note(index, call)

        call.add_done_callback(ended)
        return call


def _code_of(call: Any) -> str | None:
    """Return the code of our error that a call ended with; None if the server said none."""
    return next((str(value) for key, value in call.trailing_metadata() or () if key == CODE_KEY), None)


def _was_not_begun(error: Any) -> bool:
    code = _code_of(error)
    unreached = error.code() is grpc.StatusCode.UNAVAILABLE and "failed to connect" in (error.details() or "")
    return code == NotLeaderError.code or (code is None and unreached)
