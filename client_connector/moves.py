"""A client's move to the shards of another placement, after the server was resized: under its lease, between two steps.

The thread of the heartbeats connects to the new shards and offers the move; that of the steps takes it before it routes
the next one. So no step is in flight on the shards that a client leaves.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple

from client_connector.twins import TwinLinks
from lora_server.transport.base import Link
from lora_server.wire.terms import Terms


class Move(NamedTuple):
    """The shards of another placement, and the terms by which steps go to them. `twins`: reconnect lost replicas; None
    without."""

    terms: Terms
    links: Sequence[Link]
    twins: TwinLinks | None = None

    def drop(self) -> None:
        """Close the links."""
        if self.twins is not None:
            self.twins.close()
        for link in self.links:
            link.close()


class MoveSlot:
    """The move that a session is connected for, and its client has not taken. Thread-safe."""

    def __init__(self) -> None:
        self._move: Move | None = None
        self._is_stepping = self._is_closed = False
        self._lock = threading.Lock()

    def offer(self, move: Move) -> None:
        """Offer a move, in place of an earlier one."""
        with self._lock:
            dropped = move if self._is_closed else self._move
            self._move = None if self._is_closed else move
        if dropped is not None:
            dropped.drop()

    def take(self) -> Move | None:
        """Begin a step: return the move to make before it, if there is one. `end` ends the step."""
        self._is_stepping = True  # set before `_move` is read: `next` reads both in the other order
        if self._move is None:
            return None
        with self._lock:
            move, self._move = self._move, None
        return move

    def end(self) -> None:
        """End a step: its answers have come, or never will."""
        self._is_stepping = False

    def next(self) -> Move | None:
        """Return the move that all current and later steps use; None while a step may still use the old placement."""
        move = self._move
        return None if move is None or self._is_stepping else move

    def close(self) -> None:
        """Drop the move, and each that is offered later."""
        with self._lock:
            self._is_closed, move, self._move = True, self._move, None
        if move is not None:
            move.drop()
