"""The one way in which this package refuses an adapter."""

from __future__ import annotations

from lora_server.errors import AdapterFormatError

_MAX_CHARS = 200


def refusal(where: str, *, got: object, expected: str, do: str = "") -> AdapterFormatError:
    """The error for `where` (a tensor's key, a config field or a file), to be raised by the caller.

    `got` is shown as it is if it is text written here for the user, else pass `shown(value)`.
    """
    advice = f"; {do}" if do else ""
    return AdapterFormatError(f"{clip(where)}: got {clip(str(got))}, expected {expected}{advice}")


def shown(value: object) -> str:
    """An untrusted value on one line, without control characters."""
    try:
        return clip(repr(value))
    except (RecursionError, ValueError):
        return f"a {type(value).__name__}"


def clip(text: str) -> str:
    """`text` on one line and of bounded length."""
    line = "".join(char if char.isprintable() else "?" for char in text[: _MAX_CHARS + 1])
    return line if len(text) <= _MAX_CHARS else f"{line[:_MAX_CHARS]}..."
