"""Tokens: `ls_ID_SECRET`. The secret is random, 256 bits, so a plain digest of it is all that needs to be kept."""

from __future__ import annotations

import base64
import hashlib
import secrets
from typing import NamedTuple

from lora_server.wire.credentials import TOKEN_TEXT

NOT_GOOD = "got a token that is not good here, or not any more; ask an admin for another"


class Secret(NamedTuple):
    """A token's id and secret."""

    id: str
    secret: str

    def __str__(self) -> str:
        return f"ls_{self.id}_{self.secret}"

    def __repr__(self) -> str:
        return f"Secret(ls_{self.id}_...)"

    @property
    def digest(self) -> str:
        """Return the secret's SHA-256, which is stored instead of the secret."""
        return hashlib.sha256(self.secret.encode()).hexdigest()


def new(token_id: str = "") -> Secret:
    """Return a random secret, for a new id or for the given one."""
    return Secret(token_id or secrets.token_hex(6), secrets.token_urlsafe(32))


def parse(text: str) -> Secret | None:
    """Return a token's id and secret; None for a text that cannot be a token."""
    match = TOKEN_TEXT.fullmatch(text)
    return Secret(match[1], match[2]) if match else None


def of_header(authorization: str) -> str:
    """Return the token of an `Authorization` header: a bearer's, or a browser's password; empty without one."""
    scheme, _, rest = authorization.partition(" ")
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(rest, validate=True).decode("ascii").partition(":")[2]
        except ValueError:
            return ""
    return rest.strip() if scheme.lower() == "bearer" else ""
