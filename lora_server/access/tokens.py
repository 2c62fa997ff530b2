"""Tokens: `ls_ID_SECRET`. The secret is random, 256 bits, so a plain digest of it is all that needs to be kept."""

from __future__ import annotations

import base64
import hashlib
import re
import secrets
from typing import NamedTuple

_TEXT = re.compile(r"ls_([0-9a-f]{12})_([A-Za-z0-9_-]{43})", re.ASCII)


class Secret(NamedTuple):
    """A token's id, and what proves that somebody was given it."""

    id: str
    secret: str

    def __str__(self) -> str:
        return f"ls_{self.id}_{self.secret}"

    def __repr__(self) -> str:
        return f"Secret(ls_{self.id}_...)"

    @property
    def digest(self) -> str:
        """What is kept."""
        return hashlib.sha256(self.secret.encode()).hexdigest()


def new(token_id: str = "") -> Secret:
    """Nobody can guess it. For an id that there is already, another secret."""
    return Secret(token_id or secrets.token_hex(6), secrets.token_urlsafe(32))


def parse(text: str) -> Secret | None:
    """None for what cannot be one."""
    match = _TEXT.fullmatch(text)
    return Secret(match[1], match[2]) if match else None


def of_header(authorization: str) -> str:
    """What an `Authorization` header shows: a bearer's token, or a browser's password."""
    scheme, _, rest = authorization.partition(" ")
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(rest, validate=True).decode("ascii").partition(":")[2]
        except ValueError:
            return ""
    return rest.strip() if scheme.lower() == "bearer" else ""
