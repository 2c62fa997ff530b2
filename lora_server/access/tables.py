"""Tables of tenants, tokens, shared adapters, changes and the audit log. Times are seconds since 1970."""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, Float, Integer, String, Table, Text

from lora_server.registry.database import metadata

tenants = Table(
    "tenants",
    metadata,
    Column("name", String(64), primary_key=True),
    Column("weight", Float, nullable=False),
    Column("max_adapters", BigInteger, nullable=False),
    Column("max_bytes", BigInteger, nullable=False),
    Column("max_active", BigInteger, nullable=False),
    Column("max_rate", Float, nullable=False),
    Column("removed", Float, nullable=False),  # 0: it was not
    Column("slo_class", String(64), nullable=False, server_default=""),  # empty: none
)
tokens = Table(
    "tokens",
    metadata,
    Column("id", String(12), primary_key=True),
    Column("tenant", String(64), nullable=False),
    Column("role", String(16), nullable=False),
    Column("note", String(200), nullable=False),
    Column("digest", String(64), nullable=False),
    Column("old_digest", String(64), nullable=False),  # of the text before; empty: there was none
    Column("old_until", Float, nullable=False),
    Column("created", Float, nullable=False),
    Column("revoked", Float, nullable=False),  # 0: it was not
)
shares = Table(
    "shares",
    metadata,
    Column("adapter", String(200), primary_key=True),
    Column("tenant", String(64), primary_key=True),  # empty: all
)
changes = Table(
    "access_changes",  # the newest: a cache that has the rest reads these rows alone
    metadata,
    Column("serial", BigInteger, primary_key=True, autoincrement=False),  # what the counter of changes said then
    Column("kind", String(64), nullable=False),  # a table's name
    Column("key", String(200), nullable=False),  # of its rows that changed
)
audit = Table(
    "audit",
    metadata,
    # an INTEGER PRIMARY KEY of SQLite counts by itself
    Column("serial", BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=True),
    Column("at", Float, nullable=False),
    Column("tenant", String(64), nullable=False),
    Column("role", String(16), nullable=False),
    Column("token", String(12), nullable=False),
    Column("call", String(64), nullable=False),
    Column("subject", String(300), nullable=False),
    Column("outcome", String(32), nullable=False),
    Column("reason", Text, nullable=False),
)
