"""How much a tenant may have, and how often it may ask."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lora_server.access.store import Tenant
from lora_server.errors import LimitError, ServerBusyError
from lora_server.units import size

BURST_SECONDS = 5.0  # of its rate a tenant may ask for at once
ADDS_AT_ONCE = 4  # of one tenant: threads that read files are for all


class Bucket:
    """So many a second, and `burst` at once. Not thread-safe."""

    def __init__(self, rate: float, burst: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.rate, self.burst, self._clock = rate, burst, clock
        self._left, self._at = burst, clock()

    def take(self) -> bool:
        """One; whether there was one."""
        now = self._clock()
        self._left = min(self.burst, self._left + (now - self._at) * self.rate)
        self._at = now
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True


class Limits:
    """Thread-safe."""

    def __init__(self) -> None:
        self._buckets: dict[str, Bucket] = {}
        self._adding: Counter[str] = Counter()
        self._lock = threading.Lock()

    def check_rate(self, tenant: Tenant) -> None:
        """One more add or acquire; raises LimitError."""
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
    def adding(self, tenant: Tenant) -> Iterator[int]:
        """While one is added: how many more are. Raises ServerBusyError."""
        with self._lock:
            others = self._adding[tenant.name]
            if others >= ADDS_AT_ONCE:
                raise ServerBusyError(
                    f"tenant {tenant.name}: {others} adapters are being added, as many as may at once"
                )
            self._adding[tenant.name] += 1
        try:
            yield others
        finally:
            with self._lock:
                self._adding[tenant.name] -= 1
                self._adding += Counter()  # those at zero go


def check_adapters(tenant: Tenant, count: int) -> None:
    """With one more; raises LimitError."""
    if tenant.max_adapters and count > tenant.max_adapters:
        raise _over(tenant, f"{count} adapters, {tenant.max_adapters} may be", "remove some")


def check_bytes(tenant: Tenant, nbytes: int) -> None:
    """With one more; raises LimitError."""
    if tenant.max_bytes and nbytes > tenant.max_bytes:
        raise _over(tenant, f"adapters of {size(nbytes)}, {size(tenant.max_bytes)} may be", "remove some")


def check_active(tenant: Tenant, active: int) -> None:
    """With what is asked for; raises LimitError."""
    if tenant.max_active and active > tenant.max_active:
        raise _over(tenant, f"{active} adapters in use, {tenant.max_active} may be", "end some requests, or wait")


def _over(tenant: Tenant, got: str, do: str) -> LimitError:
    return LimitError(f"tenant {tenant.name}: got {got}; {do}, or ask the operator for more (lora-server tenants set)")
