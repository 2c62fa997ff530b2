"""The deadline margin of a waiting request: how long it may still wait and yet meet its class's TTFT objective.

    margin = objective - waited - expected load                                            (xLoRA, Eq. 5-6)

The smallest margin goes first. Unlike the paper's, a margin stops at LATE of the objective, so a late request does not
grow more urgent: otherwise, while a lax class has more requests than the server serves, all of them are late and go
before those of a strict class. A request without a class has no objective: its margin is endless.

All times are integers, in nanoseconds, so that every comparison is exact.
"""

from __future__ import annotations

import math

LATE = 4  # a late request's margin is this part of its objective
ENDLESS = 1 << 62  # more than any other time


def nanoseconds(seconds: float) -> int:
    """Convert seconds; infinity becomes ENDLESS."""
    return ENDLESS if math.isinf(seconds) else int(seconds * 1e9)


def deadline(objective: int, since: int, load: int) -> int:
    """Return the time by which a request must have its place, so that its adapters are loaded within the objective."""
    return since + objective - load


def late_margin(objective: int) -> int:
    """Return the smallest margin that a request of this objective can have."""
    return objective if objective == ENDLESS else objective // LATE


def margin(objective: int, since: int, load: int, now: int) -> int:
    """Return the margin of a request that has waited since then."""
    if objective == ENDLESS:
        return ENDLESS
    return max(deadline(objective, since, load) - now, late_margin(objective))
