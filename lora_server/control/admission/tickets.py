"""Tickets: clients' requests for adapters."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from lora_server import telemetry
from lora_server.errors import LoraServerError

TicketKey = tuple[int, int]  # client, number


class TicketClass(NamedTuple):
    """The SLO class of a ticket: its name, and the seconds to the first token that it promises."""

    name: str = ""
    objective: float = math.inf


NO_CLASS = TicketClass()


@dataclass
class Ticket:
    """A client's request to hold adapters. It is answered by the `handles` that the client now holds, or by `error`."""

    names: tuple[str, ...]
    since: float
    tenant: str = ""
    weight: float = 1.0
    pace: float | None = None  # seconds that its adapters may still load when it is answered; None: any
    slo: TicketClass = NO_CLASS
    load: float = 0.0  # seconds that loading its adapters is expected to take
    first_since: float | None = None  # when it became the first measured ticket
    waited: bool = False
    admitted: float = 0.0  # when it was given places
    handles: list[int] | None = None
    error: LoraServerError | None = None
    trace: Mapping[str, str] = field(default_factory=telemetry.headers)  # of the call that asked for it
