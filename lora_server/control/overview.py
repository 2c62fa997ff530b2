"""What the page shows: a server's status, and its hottest adapters."""

from __future__ import annotations

import heapq
import time
from typing import Any

from lora_server.control.controller import Controller
from lora_server.control.held import Listing
from lora_server.control.status import status
from lora_server.wire.plain import fields

MOST_ADAPTERS = 100


def overview(controller: Controller) -> dict[str, Any]:
    """As JSON says it: `fields` of StatusReply, `hottest`, and `seconds` of a clock, so that differences are rates."""
    hottest = heapq.nlargest(MOST_ADAPTERS, controller.adapters.listings(), key=_heat)
    found = fields(status(controller))
    return found | {"seconds": time.monotonic(), "hottest": [_adapter(one) for one in hottest]}


def _heat(one: Listing) -> tuple[int, int, str]:
    return one.holders, one.resident_layers, one.record.name


def _adapter(one: Listing) -> dict[str, Any]:
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
        "error": one.error,
    }
