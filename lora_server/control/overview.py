"""What the page shows: a server's status, and its hottest adapters."""

from __future__ import annotations

import heapq
import time
from typing import Any

from lora_server.control.controller import Controller
from lora_server.control.held import Listing
from lora_server.control.status import status
from lora_server.control.tally import Sum
from lora_server.wire.plain import fields

MOST_ADAPTERS = 100
NEVER = Sum()


def overview(controller: Controller) -> dict[str, Any]:
    """As JSON says it: `fields` of StatusReply, `hottest`, how often an adapter was there when somebody got it, and
    `seconds` of a clock, so that differences are rates."""
    used, _ = controller.adapters.tally.sums()

    def heat(one: Listing) -> tuple[int, int, int]:
        return one.holders, used.get(one.record.name, NEVER).holds, one.resident_layers

    hottest = heapq.nlargest(MOST_ADAPTERS, controller.adapters.listings(), key=heat)
    adapters = [_adapter(one, used.get(one.record.name, NEVER)) for one in hottest]
    counters = controller.adapters.admission.counters
    more = {"seconds": time.monotonic(), "hottest": adapters, "hits": counters.hits, "misses": counters.misses}
    return fields(status(controller)) | more


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
