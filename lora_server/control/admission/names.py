"""The names of adapters that clients hold or wait for, by the first part of the name: a tenant's own begin with it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable


class TenantNames:
    """Counts names, and finds those of a tenant. Not thread-safe: `AdmissionService` has the lock."""

    def __init__(self) -> None:
        self._names: dict[str, Counter[str]] = {}  # first part -> name -> times

    def count(self, name: str, more: int) -> None:
        """Count a name `more` times."""
        names = self._names.setdefault(name.partition("/")[0], Counter())
        names[name] += more
        if not names[name]:
            del names[name]
        if not names:
            del self._names[name.partition("/")[0]]

    def of(self, tenant: str) -> set[str]:
        """Return the names of a tenant's own adapters that are counted."""
        return set(self._names.get(tenant, ()))


class NamesInUse(TenantNames):
    """Follows the holds, and counts versions. Not thread-safe: `AdmissionService` has the lock."""

    def __init__(self, name_of: Callable[[int], str | None]) -> None:
        super().__init__()
        self._name_of = name_of
        self._held: dict[int, tuple[str, int]] = {}  # handle -> name, holds

    def changed(self, handle: int, more: int) -> None:
        """Count `more` holds of a version, or fewer."""
        name, holds = self._held.get(handle) or (self._name_of(handle) or "", 0)
        if holds + more > 0:
            self._held[handle] = name, holds + more
        else:
            self._held.pop(handle, None)
        if bool(holds) != (holds + more > 0):
            self.count(name, -1 if holds else 1)
