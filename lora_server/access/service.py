"""Tokens, tenants, shared adapters and the audit log, as the proto describes them."""

from __future__ import annotations

from collections.abc import Callable

from lora_server.access import store
from lora_server.access.gate import Gate
from lora_server.access.identity import OPERATOR, Identity, Role
from lora_server.access.store import Store
from lora_server.access.tokens import Secret
from lora_server.errors import ConfigError, PermissionDeniedError, ServerUnavailableError
from lora_server.wire import lora_server_pb2 as pb
from lora_server.wire.listing import fitting

MAX_PAGE = 1000  # tokens, or tenants


class AccessService:
    """`find` says the full name of an adapter that a caller means; raises UnknownAdapterError."""

    def __init__(
        self,
        gate: Gate,
        find: Callable[[Identity, str], str],
        taken: Callable[[str], bool],
        check_class: Callable[[str], object] = lambda name: None,
    ) -> None:
        """`taken` returns whether names of the operator's adapters begin with a text; `check_class` raises ConfigError
        for an SLO class that the server does not have."""
        self._gate, self._find, self._taken, self._check_class = gate, find, taken, check_class

    @property
    def _store(self) -> Store:
        if self._gate.store is None:
            raise ServerUnavailableError("this server has no database, so it has no tokens")
        return self._gate.store

    def WhoIs(self, request: pb.WhoIsRequest, who: Identity) -> pb.Caller:
        shown = who
        if request.token:
            if not who.speaks_for_others:
                raise PermissionDeniedError(
                    f"token of another caller: got one of {who}, expected an engine of the operator"
                )
            shown = self._gate.shown("Access/WhoIs", request.token)
        return pb.Caller(tenant=shown.tenant, role=shown.role, token=shown.token)

    # -- tokens

    def CreateToken(self, request: pb.CreateTokenRequest, who: Identity) -> pb.Token:
        tenant = request.tenant or who.tenant
        if not who.is_operator and tenant != who.tenant:
            raise PermissionDeniedError(f"tenant {tenant[:80]!r}: got a token of {who}, expected one of that tenant")
        token, secret = self._store.create_token(tenant, _role(request.role), request.note)
        self._gate.cache.refresh()
        return _token(token, secret)

    def RotateToken(self, request: pb.RotateTokenRequest, who: Identity) -> pb.Token:
        token, secret = self._store.rotate_token(request.id, request.overlap_seconds, who)
        self._gate.cache.refresh()
        return _token(token, secret)

    def RevokeToken(self, request: pb.RevokeTokenRequest, who: Identity) -> pb.Token:
        token = self._store.revoke_token(request.id, who)
        self._gate.cache.refresh()
        return _token(token)

    def ListTokens(self, request: pb.ListTokensRequest, who: Identity) -> pb.ListTokensReply:
        found = self._store.tokens(None if who.is_operator else who.tenant, request.page_token, MAX_PAGE + 1)
        page = fitting(map(_token, found[:MAX_PAGE]))
        return pb.ListTokensReply(tokens=page, next_page_token=page[-1].id if len(page) < len(found) else "")

    # -- tenants

    def SetTenant(self, request: pb.Tenant, who: Identity) -> pb.Tenant:
        before = self._store.tenant(request.name)
        if before is None and self._taken(f"{request.name}/"):
            raise ConfigError(
                f"tenant {request.name}: there are adapters of the operator called {request.name}/..., which would "
                "become its own; take another name, or remove them"
            )
        self._check_class(request.slo_class)
        weight = request.weight or (before.weight if before else 1.0)
        limits = (request.max_adapters, request.max_bytes, request.max_active, request.max_rate)
        tenant = self._store.set_tenant(store.Tenant(request.name, weight, *limits, slo_class=request.slo_class))
        self._gate.cache.refresh()
        return _tenant(tenant)

    def RemoveTenant(self, request: pb.RemoveTenantRequest, who: Identity) -> pb.Tenant:
        tenant = self._store.remove_tenant(request.name)
        self._gate.cache.refresh()
        return _tenant(tenant)

    def ListTenants(self, request: pb.ListTenantsRequest, who: Identity) -> pb.ListTenantsReply:
        found = self._store.tenants(request.page_token, MAX_PAGE + 1)
        page = fitting(map(_tenant, found[:MAX_PAGE]))
        return pb.ListTenantsReply(tenants=page, next_page_token=page[-1].name if len(page) < len(found) else "")

    # -- shared adapters

    def Share(self, request: pb.ShareRequest, who: Identity) -> pb.ShareReply:
        adapter = self._find(who, request.name)
        if not who.is_operator and self._gate.names.owner(adapter) != who.tenant:
            raise PermissionDeniedError(
                f"adapter {request.name!r}: belongs to another tenant; expected one of {who.tenant}"
            )
        self._store.share(adapter, request.tenant, request.stop, who)
        self._gate.cache.refresh()
        shared = self._gate.names.shared.get(adapter, set())
        return pb.ShareReply(name=adapter, tenants=sorted(shared - {OPERATOR}), all=OPERATOR in shared)

    def Audit(self, request: pb.AuditRequest, who: Identity) -> pb.AuditReply:
        self._gate.audit.flush()
        entries = self._gate.audit.read(request.after, request.most, None if who.is_operator else who.tenant)
        newest = fitting(pb.AuditEntry(**one._asdict()) for one in reversed(entries))
        return pb.AuditReply(entries=reversed(newest))


def _role(text: str) -> Role:
    try:
        return Role(text)
    except ValueError:
        raise ConfigError(f"role: got {text[:40]!r}, expected one of {', '.join(Role)}") from None


def _token(token: store.Token, secret: Secret | None = None) -> pb.Token:
    return pb.Token(
        id=token.id,
        tenant=token.tenant,
        role=token.role,
        note=token.note,
        text=str(secret) if secret is not None else "",
        created=token.created,
        revoked=token.revoked,
        overlap_until=token.old_until,
    )


def _tenant(tenant: store.Tenant) -> pb.Tenant:
    return pb.Tenant(**vars(tenant))
