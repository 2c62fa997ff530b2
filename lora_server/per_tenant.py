"""Counters by tenant: the first MOST_TENANTS tenants have one each, all others share one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

MOST_TENANTS = 100
OPERATOR, OTHERS = "(operator)", "(other)"  # no tenant's name has parentheses
_T = TypeVar("_T")


class PerTenant(Generic[_T]):
    """One counter per tenant, created by `make`; from tenant number `most` on they share one.

    One thread counts; any thread may read.
    """

    def __init__(self, make: Callable[[], _T], most: int = MOST_TENANTS) -> None:
        self._make, self._most = make, most
        self._own: dict[str, _T] = {}

    def of(self, tenant: str) -> _T:
        """Return a tenant's counter, a new one at its first use. '' is the operator."""
        name = tenant or OPERATOR
        found = self._own.get(name)
        if found is None:
            name = name if len(self._own) < self._most else OTHERS
            found = self._own.setdefault(name, self._make())
        return found

    def all(self) -> dict[str, _T]:
        """Return the counters by tenant, as a metric's label names it."""
        return dict(self._own)
