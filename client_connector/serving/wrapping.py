"""Wrapping an engine's functions, once per process. Objects that are not ours pass through unchanged."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

Make = Callable[[Any], Callable[..., Any]]
Wrap = Callable[[Any, str, Make], None]
_OURS = "_lora_server_wrapped"


def wrap(owner: Any, name: str, make: Make) -> None:
    """Replace `owner.name` by make(original), once."""
    original = getattr(owner, name)
    if is_wrapped(original):
        return
    replacement = functools.wraps(original)(make(original))
    setattr(replacement, _OURS, True)
    setattr(owner, name, replacement)


def is_wrapped(function: Any) -> bool:
    """Return whether `wrap` made this."""
    return bool(getattr(function, _OURS, False))


def ours(find: Callable[[Any], Any]) -> Callable[[Callable[..., Any]], Make]:
    """Turn `hook(original, found, self, ...)` into a wrapper of a method, for objects in which `find` finds ours.

    `original` is the bound method. Objects of an engine without a LoRA server keep it.
    """

    def decorate(hook: Callable[..., Any]) -> Make:
        def make(original: Any) -> Callable[..., Any]:
            def method(self: Any, *args: Any, **kwargs: Any) -> Any:
                found = find(self)
                if found is None:
                    return original(self, *args, **kwargs)
                return hook(functools.partial(original, self), found, self, *args, **kwargs)

            return method

        return make

    return decorate


def end_with_one_line(expected: BaseException) -> None:
    """If this error ends the process, write one line to stderr and no traceback."""
    shown = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, traceback: Any) -> None:
        if error is expected:
            print(f"lora-server: {error}", file=sys.stderr)
        else:
            shown(kind, error, traceback)

    sys.excepthook = show
