"""Limits on calls that have not sent their first message: a deadline for each, and a number for all together."""

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
    """The calls that have not sent their first message. Used on the event loop's thread only."""

    def __init__(self, seconds: float, most: int) -> None:
        self._seconds, self._most = seconds, most
        self._calls: dict[_Call, None] = {}  # oldest first

    def __len__(self) -> int:
        return len(self._calls)

    async def first(self, message: Awaitable[_T], peer: Peer, proven: set[Peer]) -> _T:
        """Wait for a call's first message. Raises ProtocolError at the deadline.

        If too many calls wait, the oldest one of the connection with the most of them ends with ServerBusyError; calls
        of `proven` connections are ended only when there are no others.
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
        if not call.limit.expired():  # otherwise its own deadline ends it in this turn of the loop
            call.ended = True
            call.limit.reschedule(0.0)
