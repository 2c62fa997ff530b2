"""Refusals of adapters, in one form."""

from __future__ import annotations

from collections.abc import Iterable

from lora_server.errors import AdapterFormatError

MAX_WARNINGS = 8  # of one kind
_MAX_CHARS, _MAX_EXPECTED = 200, 600


def refusal(where: str, *, got: object, expected: str, do: str = "") -> AdapterFormatError:
    """Return the error for `where` (a tensor's key, a config field or a file), for the caller to raise.

    `got` is shown as it is if it is text written here for the user, else pass `shown(value)`.
    """
    advice = f"; {do}" if do else ""
    return AdapterFormatError(f"{clip(where)}: got {clip(str(got))}, expected {clip(expected, _MAX_EXPECTED)}{advice}")


def shown(value: object) -> str:
    """Show an untrusted value on one line, without control characters."""
    try:
        return clip(repr(value))
    except (RecursionError, ValueError):
        return f"a {type(value).__name__}"


def clip(text: str, most: int = _MAX_CHARS) -> str:
    """Clip `text` to one line of bounded length."""
    line = "".join(char if char.isprintable() else "?" for char in text[: most + 1])
    return line if len(text) <= most else f"{line[:most]}..."


def few(warnings: Iterable[str]) -> tuple[str, ...]:
    """List the first of these, and the number of the others."""
    told = tuple(warnings)
    more = len(told) - MAX_WARNINGS
    return told if more <= 0 else (*told[:MAX_WARNINGS], f"{more:,} more of this kind")
