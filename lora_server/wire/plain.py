"""Messages as plain values for JSON."""

from __future__ import annotations

from typing import Any


def fields(message: Any) -> dict[str, Any]:
    """Return a message as plain values; numbers stay numbers, unlike in protobuf's own JSON."""

    def plain(value: Any) -> Any:
        return fields(value) if hasattr(value, "DESCRIPTOR") else value

    found = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        found[field.name] = [plain(one) for one in value] if field.is_repeated else plain(value)
    return found
