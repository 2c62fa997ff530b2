"""Names of adapters: which adapter a tenant means by a name, and which adapters it sees.

An adapter's full name is `tenant/name`. Without a tenant as its first part it is the operator's, and
every tenant may use it. Behind the service all names are full names.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import NamedTuple

from lora_server.access.identity import OPERATOR


class Names(NamedTuple):
    """A snapshot. `tenants` has removed ones too: no other tenant inherits their adapters."""

    tenants: Set[str] = frozenset()
    shared: Mapping[str, Set[str]] = {}  # full name -> tenants; the operator stands for all

    def owner(self, full: str) -> str:
        """Return the tenant that owns an adapter."""
        first, slash, _ = full.partition("/")
        return first if slash and first in self.tenants else OPERATOR

    def sees(self, tenant: str, full: str) -> bool:
        """Return whether a tenant may use an adapter and know of it."""
        owner, shared = self.owner(full), self.shared.get(full, ())
        return owner in (OPERATOR, tenant) or OPERATOR in shared or tenant in shared

    def viewers(self, full: str) -> set[str]:
        """Return the tenants that see an adapter, by the fewest names: the operator stands for all."""
        viewers = {self.owner(full), *self.shared.get(full, ())}
        return {OPERATOR} if OPERATOR in viewers else viewers

    def own(self, tenant: str, name: str) -> str:
        """Return the full name of an adapter of this tenant."""
        return name if not tenant or name.startswith(f"{tenant}/") else f"{tenant}/{name}"

    def meant(self, tenant: str, name: str) -> list[str]:
        """Return the full names that a tenant may mean by a name, in order of preference; all are visible to it."""
        candidates = dict.fromkeys((self.own(tenant, name), name))
        return [full for full in candidates if self.sees(tenant, full)]
