"""Counters by tenant: so many tenants have their own, all others share one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

MOST_TENANTS = 100
OPERATOR, OTHERS = "(operator)", "(other)"  # no tenant's name has parentheses
_T = TypeVar("_T")


class PerTenant(Generic[_T]):
    """A counter for each of the first `most` tenants that are counted, made by `make`. One thread counts, any reads."""

    def __init__(self, make: Callable[[], _T], most: int = MOST_TENANTS) -> None:
        self._make, self._most = make, most
        self._own: dict[str, _T] = {}

    def of(self, tenant: str) -> _T:
        """Return a tenant's counter; '' is the operator."""
        name = tenant or OPERATOR
        found = self._own.get(name)
        if found is None:
            name = name if len(self._own) < self._most else OTHERS
            found = self._own.setdefault(name, self._make())
        return found

    def all(self) -> dict[str, _T]:
        """Return the counters by tenant, as a metric's label names it."""
        return dict(self._own)
