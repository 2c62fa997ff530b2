"""Tenants, tokens and shared adapters in the database; all calls block, and raise ServerUnavailableError without it."""

from __future__ import annotations

import hmac
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

from sqlalchemy import ColumnElement, Connection, Row, Table, delete, func, insert, select, update

from lora_server.access import tables
from lora_server.access.identity import OPERATOR, Identity, Role
from lora_server.access.names import Names
from lora_server.access.tokens import Secret, new
from lora_server.errors import ConfigError, LimitError
from lora_server.registry.database import Database, count, counted, put_row

CHANGES = "access"  # the counter that goes up with every change here
MAX_NOTE = 200
MAX_TOKENS = 1000  # of a tenant, that are not revoked
MAX_SHARES = 10_000  # of a tenant: its adapters, times the tenants that may use each
REVOKED_KEPT = 100  # tokens of a tenant, the newest, for `tokens list`
CHANGES_KEPT = 1000  # after more of them a cache reads all rows again
KEYS = {
    tables.tenants: tables.tenants.c.name,
    tables.tokens: tables.tokens.c.id,
    tables.shares: tables.shares.c.adapter,
}
T = TypeVar("T")
_NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,62}[a-z0-9])?", re.ASCII)


@dataclass(frozen=True)
class Tenant:
    """A tenant; a limit of 0 is none."""

    name: str
    weight: float = 1.0
    max_adapters: int = 0
    max_bytes: int = 0
    max_active: int = 0
    max_rate: float = 0.0
    removed: float = 0.0
    slo_class: str = ""


@dataclass(frozen=True)
class Token:
    """A token; `digest` is of its secret, `old_digest` of the one before, which is valid until `old_until`."""

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
        """Return the identity that the token proves."""
        return Identity(self.tenant, Role(self.role), self.id)

    def is_proven_by(self, shown: Secret, now: float) -> bool:
        """Return whether a secret is valid now. Takes the same time for every wrong secret."""
        digest = shown.digest
        current, old = hmac.compare_digest(digest, self.digest), hmac.compare_digest(digest, self.old_digest)
        return not self.revoked and (current or (old and now < self.old_until))


class Known(NamedTuple):
    """A snapshot of everything here; `changes` is the number of changes up to it."""

    changes: int = 0
    tenants: Mapping[str, Tenant] = {}
    tokens: Mapping[str, Token] = {}
    names: Names = Names()


NOTHING = Known()


class Store:
    """Reads and writes the tables. Thread-safe, and safe beside other processes."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def load(self, before: Known = NOTHING) -> Known:
        """Return a snapshot; reads only rows that changed since `before`, which it returns if none did."""

        def work(connection: Connection) -> Known:
            now = counted(connection, CHANGES)  # first: what changes while this reads is read again next time
            if now == before.changes:
                return before
            since = tables.changes.c.serial.between(before.changes + 1, now)
            changed = connection.execute(select(tables.changes.c.kind, tables.changes.c.key).where(since)).all()
            whole = len(changed) != now - before.changes  # too long ago, or a change of very much
            keys = {table: {key for kind, key in changed if kind == table.name} for table in KEYS}

            def kept(table: Table, known: Mapping[str, T]) -> dict[str, T]:
                return {} if whole else {key: one for key, one in known.items() if key not in keys[table]}

            def rows(table: Table) -> Sequence[Row[Any]]:
                asked = select(table) if whole else select(table).where(KEYS[table].in_(keys[table]))
                return connection.execute(asked).all()

            tenants, tokens = kept(tables.tenants, before.tenants), kept(tables.tokens, before.tokens)
            tenants |= {row.name: Tenant(**row._mapping) for row in rows(tables.tenants)}
            tokens |= {row.id: Token(**row._mapping) for row in rows(tables.tokens)}
            shared: dict[str, set[str]] = {}
            for row in rows(tables.shares):
                shared.setdefault(row.adapter, set()).add(row.tenant)
            names = Names(frozenset(tenants), kept(tables.shares, before.names.shared) | shared)
            return Known(now, tenants, tokens, names)

        return self._database.read(work)

    # -- tokens

    def tokens(self, tenant: str | None, after: str, most: int) -> list[Token]:
        """Return up to `most` tokens of a tenant, or of all, with ids above `after`, sorted."""
        asked = select(tables.tokens).where(tables.tokens.c.id > after).order_by(tables.tokens.c.id).limit(most)
        if tenant is not None:
            asked = asked.where(tables.tokens.c.tenant == tenant)
        rows = self._database.read(lambda connection: connection.execute(asked).all())
        return [Token(**row._mapping) for row in rows]

    def create_token(self, tenant: str, role: Role, note: str = "") -> tuple[Token, Secret]:
        """Return a new token and its secret, which is not stored. Raises ConfigError, LimitError."""
        if len(note) > MAX_NOTE or not note.isprintable():
            raise ConfigError(f"note: got {len(note)} characters, expected at most {MAX_NOTE}, and printable ones")
        secret, now = new(), time.time()
        token = Token(secret.id, tenant, role.value, note, secret.digest, now)

        def work(connection: Connection) -> None:
            _change(connection, tables.tokens, token.id)
            connection.execute(insert(tables.tokens).values(vars(token)))
            if tenant != OPERATOR:
                _require_tenant(connection, tenant)
                good = (tables.tokens.c.tenant == tenant) & (tables.tokens.c.revoked == 0)
                _check_most(connection, tenant, good, MAX_TOKENS, "tokens")

        self._database.write(work)
        return token, secret

    def rotate_token(self, token_id: str, overlap: float, within: Identity) -> tuple[Token, Secret]:
        """Give a token a new secret; the old one stays valid for `overlap` seconds. Raises ConfigError."""
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
        """Revoke a token; idempotent. Raises ConfigError."""

        def work(connection: Connection) -> Token:
            was = _token(connection, token_id, within)
            if was.revoked:
                return was
            gone = _put(connection, replace(was, revoked=time.time()))
            _forget_revoked(connection, gone.tenant)
            return gone

        return self._database.write(work)

    # -- tenants

    def tenant(self, name: str) -> Tenant | None:
        """Return a tenant, a removed one too, or None."""
        return self._database.read(lambda connection: _find_tenant(connection, name))

    def tenants(self, after: str, most: int) -> list[Tenant]:
        """Return up to `most` tenants with names above `after`, sorted."""
        asked = select(tables.tenants).where(tables.tenants.c.name > after).order_by(tables.tenants.c.name).limit(most)
        rows = self._database.read(lambda connection: connection.execute(asked).all())
        return [Tenant(**row._mapping) for row in rows]

    def set_tenant(self, tenant: Tenant) -> Tenant:
        """Create a tenant, or change its limits. Raises ConfigError."""
        _check_name(tenant.name)
        if not 0 < tenant.weight <= 1000 or not 0 <= tenant.max_rate < 1e9:
            raise ConfigError(
                f"tenant {tenant.name}: got weight {tenant.weight:g} and rate {tenant.max_rate:g}, expected a weight "
                "above 0, up to 1000, and a rate of 0 (no limit) or more"
            )

        def work(connection: Connection) -> None:
            _change(connection, tables.tenants, tenant.name)
            known = _find_tenant(connection, tenant.name)
            if known is not None and known.removed:
                raise ConfigError(f"tenant {tenant.name}: was removed, and its name is not given again; take another")
            put_row(connection, tables.tenants, tables.tenants.c.name == tenant.name, vars(tenant))

        self._database.write(work)
        return tenant

    def remove_tenant(self, name: str) -> Tenant:
        """Remove a tenant and revoke its tokens; its name and its adapters' names stay reserved. Raises ConfigError."""

        def work(connection: Connection) -> Tenant:
            count(connection, CHANGES)  # of very much
            gone = replace(_require_tenant(connection, name), removed=time.time())
            put_row(connection, tables.tenants, tables.tenants.c.name == name, vars(gone))
            revoke = update(tables.tokens).where(tables.tokens.c.tenant == name, tables.tokens.c.revoked == 0)
            connection.execute(revoke.values(revoked=gone.removed))
            _forget_revoked(connection, name)
            connection.execute(delete(tables.shares).where(tables.shares.c.tenant == name))
            return gone

        return self._database.write(work)

    # -- shared adapters

    def share(self, adapter: str, tenant: str, stop: bool, within: Identity) -> None:
        """Share an adapter with a tenant, or with all; `stop` ends that, for every tenant where none is named.

        Raises ConfigError, LimitError; a tenant does not learn which others exist.
        """

        def work(connection: Connection) -> None:
            if tenant != OPERATOR:
                _check_name(tenant)
                if within.is_operator:
                    _require_tenant(connection, tenant)
            _change(connection, tables.shares, adapter)
            if stop:
                gone = delete(tables.shares).where(tables.shares.c.adapter == adapter)
                connection.execute(gone.where(tables.shares.c.tenant == tenant) if tenant else gone)
            else:
                same = (tables.shares.c.adapter == adapter) & (tables.shares.c.tenant == tenant)
                put_row(connection, tables.shares, same, {"adapter": adapter, "tenant": tenant})
                if not within.is_operator:
                    own = tables.shares.c.adapter.startswith(f"{within.tenant}/", autoescape=True)
                    _check_most(connection, within.tenant, own, MAX_SHARES, "shares of its adapters")

        self._database.write(work)


def _check_name(tenant: str) -> None:
    if not _NAME.fullmatch(tenant):
        raise ConfigError(f"tenant: got {tenant[:80]!r}, expected 1 to 64 of a-z, 0-9 and -, with no - first or last")


def _change(connection: Connection, table: Table, key: str) -> None:
    """Record a change. Call it first in a transaction: its counter's row makes changes run one after the other."""
    serial = count(connection, CHANGES)
    connection.execute(insert(tables.changes).values(serial=serial, kind=table.name, key=key))
    connection.execute(delete(tables.changes).where(tables.changes.c.serial <= serial - CHANGES_KEPT))


def _check_most(connection: Connection, tenant: str, which: ColumnElement[bool], most: int, what: str) -> None:
    found = connection.execute(select(func.count()).where(which)).scalar() or 0
    if found > most:
        raise LimitError(f"tenant {tenant}: got {found:,} {what}, {most:,} may be; end some of them first")


def _forget_revoked(connection: Connection, tenant: str) -> None:
    """Delete a tenant's revoked tokens except the newest, since a tenant may create and revoke tokens without end."""
    revoked = (tables.tokens.c.tenant == tenant) & (tables.tokens.c.revoked > 0)
    oldest = select(tables.tokens.c.id).where(revoked).order_by(tables.tokens.c.revoked.desc()).offset(REVOKED_KEPT)
    for token_id in connection.execute(oldest).scalars().all():
        _change(connection, tables.tokens, token_id)
        connection.execute(delete(tables.tokens).where(tables.tokens.c.id == token_id))


def _put(connection: Connection, token: Token) -> Token:
    _change(connection, tables.tokens, token.id)
    put_row(connection, tables.tokens, tables.tokens.c.id == token.id, vars(token))
    return token


def _token(connection: Connection, token_id: str, within: Identity) -> Token:
    """Read a token and lock its row. Another tenant's raises the same ConfigError as one that does not exist."""
    asked = select(tables.tokens).where(tables.tokens.c.id == token_id).with_for_update()
    row = connection.execute(asked).one_or_none()
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
