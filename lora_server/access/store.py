"""Tenants, tokens and shared adapters in the database; all calls block, and raise ServerUnavailableError without it."""

from __future__ import annotations

import hmac
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from sqlalchemy import Connection, Table, delete, insert, select, update

from lora_server.access import tables
from lora_server.access.identity import OPERATOR, Identity, Role
from lora_server.access.names import Names
from lora_server.access.tokens import Secret, new
from lora_server.errors import ConfigError
from lora_server.registry.database import Database, count, counted

CHANGES = "access"  # the counter that goes up with every change here
MAX_NOTE = 200
_NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,62}[a-z0-9])?", re.ASCII)


@dataclass(frozen=True)
class Tenant:
    """Limits: 0 is none."""

    name: str
    weight: float = 1.0
    max_adapters: int = 0
    max_bytes: int = 0
    max_active: int = 0
    max_rate: float = 0.0
    removed: float = 0.0


@dataclass(frozen=True)
class Token:
    """`digest` and `old_digest`: of its text, and of the one before, which is good until `old_until`."""

    id: str
    tenant: str
    role: str
    note: str
    digest: str = field(repr=False)
    created: float
    old_digest: str = field(default="", repr=False)
    old_until: float = 0.0
    revoked: float = 0.0

    @property
    def identity(self) -> Identity:
        """Whom it proves."""
        return Identity(self.tenant, Role(self.role), self.id)

    def is_proven_by(self, shown: Secret, now: float) -> bool:
        """In constant time, whichever is good."""
        digest = shown.digest
        current, old = hmac.compare_digest(digest, self.digest), hmac.compare_digest(digest, self.old_digest)
        return not self.revoked and (current or (old and now < self.old_until))


class Known(NamedTuple):
    """All that was known at one time; `changes` counts up with what is."""

    changes: int = 0
    tenants: Mapping[str, Tenant] = {}
    tokens: Mapping[str, Token] = {}
    names: Names = Names()


class Store:
    """Thread-safe, and safe beside other processes."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def changes(self) -> int:
        """Goes up with every change."""
        return self._database.read(lambda connection: counted(connection, CHANGES))

    def load(self) -> Known:
        """All of it."""

        def work(connection: Connection) -> Known:
            tenants = {row.name: Tenant(**row._mapping) for row in connection.execute(select(tables.tenants))}
            tokens = {row.id: Token(**row._mapping) for row in connection.execute(select(tables.tokens))}
            shared: dict[str, set[str]] = {}
            for adapter, tenant in connection.execute(select(tables.shares)):
                shared.setdefault(adapter, set()).add(tenant)
            return Known(counted(connection, CHANGES), tenants, tokens, Names(frozenset(tenants), shared))

        return self._database.read(work)

    # -- tokens

    def create_token(self, tenant: str, role: Role, note: str = "") -> tuple[Token, Secret]:
        """With its text, which nobody can be told again. Raises ConfigError."""
        if len(note) > MAX_NOTE or not note.isprintable():
            raise ConfigError(f"note: got {len(note)} characters, expected at most {MAX_NOTE}, and printable ones")
        secret, now = new(), time.time()
        token = Token(secret.id, tenant, role.value, note, secret.digest, now)

        def work(connection: Connection) -> None:
            if tenant != OPERATOR:
                _require_tenant(connection, tenant)
            _change(connection)
            connection.execute(insert(tables.tokens).values(vars(token)))

        self._database.write(work)
        return token, secret

    def rotate_token(self, token_id: str, overlap: float, within: Identity) -> tuple[Token, Secret]:
        """A new text; the old one is good for `overlap` seconds more. Raises ConfigError."""
        if not 0 <= overlap <= 30 * 86400:
            raise ConfigError(f"overlap: got {overlap:g} s, expected 0 to 30 days")
        secret = new(token_id)

        def work(connection: Connection) -> Token:
            was = _token(connection, token_id, within)
            if was.revoked:
                raise ConfigError(f"token {token_id}: was revoked; create another")
            until = time.time() + overlap
            return _put(connection, replace(was, digest=secret.digest, old_digest=was.digest, old_until=until))

        return self._database.write(work), secret

    def revoke_token(self, token_id: str, within: Identity) -> Token:
        """It proves nothing any more. Raises ConfigError."""

        def work(connection: Connection) -> Token:
            was = _token(connection, token_id, within)
            return was if was.revoked else _put(connection, replace(was, revoked=time.time()))

        return self._database.write(work)

    # -- tenants

    def set_tenant(self, tenant: Tenant) -> Tenant:
        """Make it, or change what is known of it. Raises ConfigError."""
        _check_name(tenant.name)
        if not 0 < tenant.weight <= 1000 or not 0 <= tenant.max_rate < 1e9:
            raise ConfigError(
                f"tenant {tenant.name}: got weight {tenant.weight:g} and rate {tenant.max_rate:g}, expected a weight "
                "above 0, up to 1000, and a rate of 0 (no limit) or more"
            )

        def work(connection: Connection) -> None:
            known = _find_tenant(connection, tenant.name)
            if known is not None and known.removed:
                raise ConfigError(f"tenant {tenant.name}: was removed, and its name is not given again; take another")
            _change(connection)
            _replace(connection, tables.tenants, {"name": tenant.name}, vars(tenant))

        self._database.write(work)
        return tenant

    def remove_tenant(self, name: str) -> Tenant:
        """Its tokens are revoked; what was its adapters' names stays its own. Raises ConfigError."""

        def work(connection: Connection) -> Tenant:
            gone = replace(_require_tenant(connection, name), removed=time.time())
            _change(connection)
            _replace(connection, tables.tenants, {"name": name}, vars(gone))
            revoke = update(tables.tokens).where(tables.tokens.c.tenant == name, tables.tokens.c.revoked == 0)
            connection.execute(revoke.values(revoked=gone.removed))
            connection.execute(delete(tables.shares).where(tables.shares.c.tenant == name))
            return gone

        return self._database.write(work)

    # -- shared adapters

    def share(self, adapter: str, tenant: str, stop: bool, within: Identity) -> None:
        """With a tenant, or all; or not any more, with nobody where no tenant is named. Tenants are not told which
        others there are. Raises ConfigError."""

        def work(connection: Connection) -> None:
            if tenant != OPERATOR:
                _check_name(tenant)
                if within.is_operator:
                    _require_tenant(connection, tenant)
            _change(connection)
            if stop:
                gone = delete(tables.shares).where(tables.shares.c.adapter == adapter)
                connection.execute(gone.where(tables.shares.c.tenant == tenant) if tenant else gone)
            else:
                one = {"adapter": adapter, "tenant": tenant}
                _replace(connection, tables.shares, one, one)

        self._database.write(work)


def _check_name(tenant: str) -> None:
    if not _NAME.fullmatch(tenant):
        raise ConfigError(f"tenant: got {tenant[:80]!r}, expected 1 to 64 of a-z, 0-9 and -, with no - first or last")


def _change(connection: Connection) -> None:
    """First in a transaction: so changes come one after the other."""
    count(connection, CHANGES)


def _put(connection: Connection, token: Token) -> Token:
    _change(connection)
    _replace(connection, tables.tokens, {"id": token.id}, vars(token))
    return token


def _replace(connection: Connection, table: Table, key: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    connection.execute(delete(table).where(*(table.c[name] == value for name, value in key.items())))
    connection.execute(insert(table).values(dict(values)))


def _token(connection: Connection, token_id: str, within: Identity) -> Token:
    """Who is of another tenant is told the same of one that there is and of one that there is not."""
    row = connection.execute(select(tables.tokens).where(tables.tokens.c.id == token_id)).one_or_none()
    token = Token(**row._mapping) if row is not None else None
    if token is None or not (within.is_operator or within.tenant == token.tenant):
        raise ConfigError(f"token: got {token_id[:40]!r}, expected the id of one; see lora-server tokens list")
    return token


def _find_tenant(connection: Connection, name: str) -> Tenant | None:
    row = connection.execute(select(tables.tenants).where(tables.tenants.c.name == name)).one_or_none()
    return Tenant(**row._mapping) if row is not None else None


def _require_tenant(connection: Connection, name: str) -> Tenant:
    tenant = _find_tenant(connection, name)
    if tenant is None or tenant.removed:
        raise ConfigError(f"tenant: got {name[:80]!r}, expected one that there is; see lora-server tenants list")
    return tenant
