"""A caller's identity: a tenant, and a role in it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

OPERATOR = ""  # the tenant that runs the server


class Role(StrEnum):
    """The rights that a token gives; see rights."""

    ADMIN = "admin"  # of tokens, limits, everything
    PUBLISHER = "publisher"  # of adapters
    ENGINE = "engine"  # computes with them
    VIEWER = "viewer"  # looks at what there is


@dataclass(frozen=True)
class Identity:
    """`token` is the id of what was shown; empty where no tokens are required."""

    tenant: str
    role: Role
    token: str = ""

    @property
    def is_operator(self) -> bool:
        """Return whether the caller belongs to the tenant that runs the server."""
        return self.tenant == OPERATOR

    @property
    def sees_all(self) -> bool:
        """Return whether the caller sees every tenant's adapters. An engine does not: it may serve any tenant."""
        return self.is_operator and self.role is not Role.ENGINE

    @property
    def speaks_for_others(self) -> bool:
        """Return whether the caller may act on behalf of a tenant."""
        return self.is_operator and self.role in (Role.ADMIN, Role.ENGINE)

    def __str__(self) -> str:
        whose = f"tenant {self.tenant}" if self.tenant else "the operator"
        return f"{self.role} of {whose}"


ANYBODY = Identity(OPERATOR, Role.ADMIN)  # where no tokens are required
