"""Eviction policy: pure functions of entries, independent of where their bytes lie.

Never evicted: an entry that is needed earlier than the newcomer, and one in use before the end of its stay; the evictor
also spares those that steps read and those that are pinned. Of the others, preloaded and unused ones go first, then
those that are not in demand, and among these the one that the policy values least. Active ones, which clients hold, are
evicted for no other as long as they fit together, and every other one is evicted for them at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

from lora_server.memory.entry import HALF_LIFE, AdapterEntry

IN_USE_SECONDS = 0.25  # since the last step that read it
LEAST = 1e-300  # value of an adapter that was never used

Policy = Callable[[AdapterEntry], float]  # value of an adapter


def lru(entry: AdapterEntry) -> float:
    """Evict the least recently used first."""
    return entry.usage.last


def value_density(entry: AdapterEntry) -> float:
    """Value an adapter by the loading seconds that a byte of it saves: rate of use x load time / bytes.

    Returned as a logarithm, in which rates of different times can be compared: all of them halve alike.
    """
    usage = entry.usage
    worth = usage.rate * usage.load_seconds / max(1, entry.footprint.nbytes)
    return math.log2(max(worth, LEAST)) + usage.last / HALF_LIFE


POLICIES: Mapping[str, Policy] = {"lru": lru, "value": value_density}


def victims(
    missing: int, resident: Iterable[AdapterEntry], size: Callable[[AdapterEntry], int], policy: Policy
) -> list[AdapterEntry] | None:
    """Choose entries that together free `missing` bytes, least wanted first; None if all together have less."""
    chosen = []
    for entry in sorted(resident, key=lambda one: (*_rank(one), policy(one))):
        if missing <= 0:
            break
        chosen.append(entry)
        missing -= size(entry)
    if missing > 0:
        return None
    for entry in reversed(chosen[:-1]):  # a large one that was chosen last may have made others needless
        if missing + size(entry) <= 0:
            chosen.remove(entry)
            missing += size(entry)
    return chosen


def _rank(entry: AdapterEntry) -> tuple[bool, bool, bool, float]:
    """Order evictions: spare ones, those that are not in demand, those that are needed last, active ones."""
    return entry.active, not entry.is_spare(), entry.is_wanted(), -entry.deadline()


def may_go(entry: AdapterEntry, newcomer: AdapterEntry, now: float, active_fit: bool = True) -> bool:
    """Return whether an entry may be evicted for the newcomer; `active_fit`: all active ones fit the pool together."""
    entry.expire_wants(now)
    if entry.active and (active_fit or not newcomer.active):
        return False
    if entry.is_spare() or (newcomer.active and not entry.active):
        return True
    if entry.is_wanted() and (entry.deadline(), entry.order) <= (newcomer.deadline(), newcomer.order):
        return False
    in_use = now - entry.usage.last < IN_USE_SECONDS
    return not (in_use and now < entry.stays_until())
