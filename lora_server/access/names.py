"""What an adapter's name means to a tenant, and which adapters it sees.

An adapter's full name is `tenant/name`. One whose first part is no tenant is the operator's, and everybody's to use.
Everywhere behind the service there are full names alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from typing import NamedTuple

from lora_server.access.identity import OPERATOR


class Names(NamedTuple):
    """Of all tenants, removed ones too: what was theirs is nobody else's."""

    tenants: Set[str] = frozenset()
    shared: Mapping[str, Set[str]] = {}  # full name -> tenants; the operator stands for all

    def owner(self, full: str) -> str:
        """Whose adapter it is."""
        first, slash, _ = full.partition("/")
        return first if slash and first in self.tenants else OPERATOR

    def sees(self, tenant: str, full: str) -> bool:
        """Whether a tenant may use it, or know of it."""
        owner, shared = self.owner(full), self.shared.get(full, ())
        return owner in (OPERATOR, tenant) or OPERATOR in shared or tenant in shared

    def own(self, tenant: str, name: str) -> str:
        """The full name of an adapter of this tenant."""
        return name if not tenant or name.startswith(f"{tenant}/") else f"{tenant}/{name}"

    def meant(self, tenant: str, name: str) -> list[str]:
        """What a tenant may mean by a name, the first that there is; it is never one that the tenant does not see."""
        candidates = dict.fromkeys((self.own(tenant, name), name))
        return [full for full in candidates if self.sees(tenant, full)]

    def visible(self, tenant: str, names: Iterable[str]) -> list[str]:
        """Those that a tenant sees."""
        return [name for name in names if self.sees(tenant, name)]
