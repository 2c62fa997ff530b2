"""Tells a thread whether the caller of the RPC that it works for still waits, so that slow work can stop early."""

from __future__ import annotations

import threading
from contextvars import ContextVar

_left: ContextVar[threading.Event] = ContextVar("left")


def bind(left: threading.Event) -> None:
    """Bind `left`, which is set once the RPC's caller is gone, to this context; call it in the RPC's context."""
    _left.set(left)


def has_left() -> bool:
    """Return whether the RPC's caller is gone; False outside an RPC."""
    left = _left.get(None)
    return left is not None and left.is_set()
