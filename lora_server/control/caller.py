"""Whether the caller of the RPC that this thread works for still waits: slow work ends with it."""

from __future__ import annotations

import threading
from contextvars import ContextVar

_left: ContextVar[threading.Event] = ContextVar("left")


def bind(left: threading.Event) -> None:
    """In the context that the RPC runs in; `left` is set once its caller is gone."""
    _left.set(left)


def has_left() -> bool:
    """False also where no RPC runs."""
    left = _left.get(None)
    return left is not None and left.is_set()
