"""Calls whose message has not come yet: each has a deadline, and too many of them end those of their own connection."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import TypeVar

from lora_server.control.connections import Peer
from lora_server.errors import ProtocolError, ServerBusyError

_T = TypeVar("_T")


@dataclass(eq=False)
class _Call:
    peer: Peer
    limit: asyncio.Timeout
    ended: bool = False


class SilentCalls:
    """On the event loop's thread alone."""

    def __init__(self, seconds: float, most: int) -> None:
        self._seconds, self._most = seconds, most
        self._calls: dict[_Call, None] = {}  # oldest first

    def __len__(self) -> int:
        return len(self._calls)

    async def first(self, message: Awaitable[_T], peer: Peer, proven: set[Peer]) -> _T:
        """Wait for a call's first message. Raises ProtocolError at the deadline.

        Where too many calls wait, one of the connection that has most of them ends with ServerBusyError, the oldest;
        connections of `proven` come last.
        """
        if len(self._calls) >= self._most:
            self._end_one(proven)
        call = _Call(peer, asyncio.timeout(self._seconds))
        try:
            async with call.limit:
                self._calls[call] = None
                return await message
        except TimeoutError:
            if call.ended:
                raise ServerBusyError(
                    f"{self._most} calls are silent, most of them of this connection; end some"
                ) from None
            raise ProtocolError(f"no message within {self._seconds:g} s; expected one at once") from None
        finally:
            self._calls.pop(call, None)

    def _end_one(self, proven: set[Peer]) -> None:
        of_peer = Counter(call.peer for call in self._calls)
        call = max(self._calls, key=lambda one: (one.peer not in proven, of_peer[one.peer]))  # of equals the first
        del self._calls[call]
        if not call.limit.expired():  # its own deadline may end it in this very turn of the loop
            call.ended = True
            call.limit.reschedule(0.0)
