"""The data of the web page: a server's status, and its hottest adapters."""

from __future__ import annotations

import heapq
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from lora_server.control.adapters.listings import Listing
from lora_server.control.admission.tally import Sum
from lora_server.control.controller import Controller
from lora_server.control.reports.status import status
from lora_server.histogram import Histogram
from lora_server.wire.plain import fields
from lora_server.wire.waits import WAITS, WaitHistograms

MOST_ADAPTERS = MOST_TENANTS = 100
NEVER = Sum()


def overview(controller: Controller, owner: Callable[[str], str]) -> dict[str, Any]:
    """Return the page's data as a JSON object: `fields` of StatusReply, `hottest` adapters, `tenants`, `hits` and
    `misses` of acquired adapters, `waits` of requests, and a clock's `seconds`, so that differences become rates.
    `owner` returns an adapter's tenant."""
    used, _ = controller.adapters.admission.tally.sums()
    listings = controller.adapters.listings
    hottest = listings.hottest({name: one.holds for name, one in used.items()}, MOST_ADAPTERS)
    adapters = [_adapter(one, used.get(one.record.name, NEVER)) for one in hottest]
    counters = controller.adapters.admission.queue.counters
    more = {"seconds": time.monotonic(), "hottest": adapters, "hits": counters.hits, "misses": counters.misses}
    engines = Counter(lease.engine.tenant for lease, _ in controller.clients.leases.silences())
    more["waits"] = _waits(controller.clients.waits.all().values())
    return fields(status(controller)) | more | {"tenants": _tenants(listings.tenants(owner), engines)}


def _waits(tenants: Iterable[WaitHistograms]) -> list[dict[str, Any]]:
    """Add up what requests of all tenants waited for. Clients tell it: sums may exceed what a message can carry."""
    waits = {what: Histogram() for what in WAITS}
    for tenant in tenants:
        for what, one in tenant.of.items():
            waits[what].merge(one.counts, one.sum_ns)
    counted = {what: one for what, one in waits.items() if any(one.counts)}
    return [{"phase": what, "counts": one.counts, "sum_ns": one.sum_ns} for what, one in counted.items()]


def _tenants(adapters: Mapping[str, tuple[int, int]], engines: Counter[str]) -> list[dict[str, Any]]:
    """`adapters`: of each tenant, and how many of them are in use."""
    if not any((*adapters, *engines)):
        return []
    rows = (
        {
            "tenant": name or "(operator)",
            "engines": engines[name],
            "adapters": adapters.get(name, (0, 0))[0],
            "in use": adapters.get(name, (0, 0))[1],
        }
        for name in {**engines, **adapters}
    )
    return heapq.nlargest(MOST_TENANTS, rows, key=lambda row: (row["in use"], row["engines"], row["adapters"]))


def _adapter(one: Listing, used: Sum) -> dict[str, Any]:
    record = one.record
    return {
        "name": record.name,
        "version": record.version,
        "state": one.state,
        "bytes": record.nbytes,
        "lora_rank": record.lora_rank,
        "pinned": record.pinned,
        "resident_layers": one.resident_layers,
        "layers": one.layers,
        "holders": one.holders,
        "holds": used.holds,
        "hold_seconds": used.seconds,
        "error": one.error,
    }
