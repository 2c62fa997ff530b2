"""Limits of a tenant: adapters, bytes, adapters in use, calls per second."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lora_server.access.store import Tenant
from lora_server.errors import LimitError, ServerBusyError
from lora_server.units import size

BURST_SECONDS = 5.0  # of its rate a tenant may ask for at once
ADDS_AT_ONCE = 4  # of one tenant: threads that read files are for all


class Bucket:
    """A token bucket: `rate` per second, `burst` at once. Not thread-safe."""

    def __init__(self, rate: float, burst: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.rate, self.burst, self._clock = rate, burst, clock
        self._left, self._at = burst, clock()

    def take(self) -> bool:
        """Take one token; return False if there is none."""
        now = self._clock()
        self._left = min(self.burst, self._left + (now - self._at) * self.rate)
        self._at = now
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True


class TenantLimits:
    """Counts what each tenant does now. Thread-safe."""

    def __init__(self) -> None:
        self._buckets: dict[str, Bucket] = {}
        self._adding: dict[str, list[str]] = {}  # names, by tenant
        self._lock = threading.Lock()

    def check_rate(self, tenant: Tenant) -> None:
        """Count one more add or acquire; raises LimitError if the tenant's rate is exceeded."""
        if not tenant.max_rate:
            return
        with self._lock:
            bucket = self._buckets.get(tenant.name)
            if bucket is None or bucket.rate != tenant.max_rate:
                burst = max(1.0, tenant.max_rate * BURST_SECONDS)
                bucket = self._buckets[tenant.name] = Bucket(tenant.max_rate, burst)
            allowed = bucket.take()
        if not allowed:
            raise _over(tenant, f"more than {tenant.max_rate:g} adds and acquires a second", "ask less often")

    @contextmanager
    def adding(self, tenant: Tenant, name: str) -> Iterator[set[str]]:
        """Count an adapter as being added; yield the names of all that are. Raises ServerBusyError."""
        with self._lock:
            names = self._adding.setdefault(tenant.name, [])
            if len(names) >= ADDS_AT_ONCE:
                raise ServerBusyError(
                    f"tenant {tenant.name}: {len(names)} concurrent adds is the limit for a tenant; retry later"
                )
            names.append(name)
            added = set(names)
        try:
            yield added
        finally:
            with self._lock:
                names.remove(name)
                if not names:
                    del self._adding[tenant.name]


def check_adapters(tenant: Tenant, count: int) -> None:
    """Raise LimitError if `count`, adapters that are being added included, is too many."""
    if tenant.max_adapters and count > tenant.max_adapters:
        raise _over(tenant, f"{count} adapters, {tenant.max_adapters} may be", "remove some")


def check_bytes(tenant: Tenant, nbytes: int) -> None:
    """Raise LimitError if `nbytes`, the new adapter's included, is too much."""
    if tenant.max_bytes and nbytes > tenant.max_bytes:
        raise _over(tenant, f"adapters of {size(nbytes)}, {size(tenant.max_bytes)} may be", "remove some")


def check_active(tenant: Tenant, active: int) -> None:
    """Raise LimitError if `active`, requested adapters included, is too many."""
    if tenant.max_active and active > tenant.max_active:
        raise _over(tenant, f"{active} adapters in use, {tenant.max_active} may be", "end some requests, or wait")


def _over(tenant: Tenant, got: str, do: str) -> LimitError:
    return LimitError(f"tenant {tenant.name}: got {got}; {do}, or ask the operator for more (lora-server tenants set)")
