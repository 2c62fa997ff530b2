"""Tenants of a server, and tokens for them."""

import itertools
from pathlib import Path

from lora_server.access.identity import Role
from lora_server.access.store import Store, Tenant
from lora_server.registry.database import FILE, Database


def make_tokens(data_dir: Path, *tenants: str) -> dict[tuple[str, Role], str]:
    """Make tenants; a token for each of them, and for the operator (''), of each role that acts."""
    database = Database(f"sqlite:///{data_dir / FILE}")
    store = Store(database)
    for tenant in tenants:
        store.set_tenant(Tenant(tenant))
    pairs = itertools.product(("", *tenants), (Role.ENGINE, Role.PUBLISHER, Role.ADMIN))
    tokens = {(tenant, role): str(store.create_token(tenant, role)[1]) for tenant, role in pairs}
    database.close()
    return tokens
