"""The roles that may call each entry point of a server, gRPC and HTTP. Any other call is refused."""

from __future__ import annotations

from typing import NamedTuple

from lora_server.access.identity import Identity, Role
from lora_server.errors import PermissionDeniedError


class Right(NamedTuple):
    """The roles that may make a call. `operator`: of the operator alone; `public`: no token is needed."""

    roles: frozenset[Role] = frozenset()
    operator: bool = False
    public: bool = False

    def allows(self, who: Identity) -> bool:
        """Return whether a caller has this right."""
        return self.public or (who.role in self.roles and (who.is_operator or not self.operator))


def _right(*roles: Role, operator: bool = False) -> Right:
    return Right(frozenset(roles), operator)


_ADMIN = _right(Role.ADMIN)
_OPERATORS_ADMIN = _right(Role.ADMIN, operator=True)
_PUBLISH = _right(Role.ADMIN, Role.PUBLISHER)
_COMPUTE = _right(Role.ADMIN, Role.ENGINE)
_WATCH = _right(Role.ADMIN, Role.VIEWER, operator=True)
_ALL = _right(*Role)
_PUBLIC = Right(public=True)

RIGHTS: dict[str, Right] = {
    "Adapters/Add": _PUBLISH,
    "Adapters/Remove": _PUBLISH,
    "Adapters/Update": _PUBLISH,
    "Adapters/Rollback": _PUBLISH,
    "Adapters/List": _ALL,
    "Adapters/Get": _ALL,
    "Adapters/Pin": _right(Role.ADMIN, Role.PUBLISHER, operator=True),  # it takes memory from all tenants
    "Adapters/Unpin": _right(Role.ADMIN, Role.PUBLISHER, operator=True),
    "Clients/Join": _COMPUTE,
    "Clients/Heartbeat": _COMPUTE,
    "Clients/Leave": _COMPUTE,
    "Clients/Acquire": _COMPUTE,
    "Clients/Await": _COMPUTE,
    "Clients/Cancel": _COMPUTE,
    "Clients/Release": _COMPUTE,
    "Clients/Hold": _COMPUTE,
    "Clients/Prefetch": _COMPUTE,
    "Clients/Restore": _COMPUTE,
    "Clients/Borrow": _COMPUTE,
    "Clients/World": _COMPUTE,
    "Server/Status": _ALL,
    "Server/Drain": _OPERATORS_ADMIN,
    "Server/Resume": _OPERATORS_ADMIN,
    "Server/Resize": _OPERATORS_ADMIN,
    "Access/WhoIs": _ALL,
    "Access/CreateToken": _ADMIN,
    "Access/RotateToken": _ADMIN,
    "Access/RevokeToken": _ADMIN,
    "Access/ListTokens": _ADMIN,
    "Access/SetTenant": _OPERATORS_ADMIN,
    "Access/RemoveTenant": _OPERATORS_ADMIN,
    "Access/ListTenants": _OPERATORS_ADMIN,
    "Access/Share": _PUBLISH,
    "Access/Audit": _ADMIN,
    "Events/Open": _ALL,
    "Events/Replay": _ALL,
    "Shards/Register": _PUBLIC,  # the secret of its node proves it: control/rpc/registration.py
    "Shards/LeaseRank": _PUBLIC,  # the same
    "Shards/FollowLayouts": _PUBLIC,  # the same
    "Shards/Files": _PUBLIC,  # by what it registered as: control/rpc/files.py
    "Shards/Read": _PUBLIC,
    "Health/Check": _PUBLIC,  # yes or no
    "/livez": _PUBLIC,
    "/readyz": _PUBLIC,  # yes, or why not; the names in it need a token
    "/metrics": _WATCH,
    "/status.json": _WATCH,
    "/status.events": _WATCH,
    "/": _PUBLIC,  # the page without anything on it
    "/page.css": _PUBLIC,
    "/page.js": _PUBLIC,
}
# audited, whatever their outcome
CHANGES = frozenset(
    f"{service}/{method}"
    for service, methods in {
        "Adapters": ("Add", "Remove", "Update", "Rollback", "Pin", "Unpin"),
        "Server": ("Drain", "Resume", "Resize"),
        "Access": ("CreateToken", "RotateToken", "RevokeToken", "SetTenant", "RemoveTenant", "Share"),
    }.items()
    for method in methods
)


def check(call: str, who: Identity) -> None:
    """Raise PermissionDeniedError for a call that the caller may not make."""
    right = RIGHTS.get(call, Right())
    if not right.allows(who):
        roles = " or ".join(sorted(right.roles)) or "none"
        expected = f"{roles} of the operator" if right.operator else roles
        raise PermissionDeniedError(f"{call}: got a token of {who}, expected one of {expected}; ask an admin for one")
