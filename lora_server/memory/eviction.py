"""Who makes room, and for whom: pure functions of entries, apart from where their bytes lie.

Never: one that is to stay (`adapters pin`), one that is needed earlier, one in use whose turn is not over; the store
leaves out those that steps read. Of the others those go first that were preloaded and not used, then those that nobody
has asked for, and among them the one that the policy values least. Active ones, which clients hold, make room for
nobody as long as they fit together, and every other one makes room for them at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

from lora_server.memory.entry import HALF_LIFE, Entry

IN_USE_SECONDS = 0.25  # since the last step that read it
LEAST = 1e-300  # what an adapter that nobody has used yet is worth

Policy = Callable[[Entry], float]  # what an adapter is worth


def lru(entry: Entry) -> float:
    """The least recently used goes first."""
    return entry.usage.last


def value_density(entry: Entry) -> float:
    """Seconds of loading that a byte saves: rate of use x load time / bytes.

    As a logarithm, in which rates of different times can be compared: all of them halve alike.
    """
    usage = entry.usage
    worth = usage.rate * usage.load_seconds / max(1, entry.nbytes)
    return math.log2(max(worth, LEAST)) + usage.last / HALF_LIFE


POLICIES: Mapping[str, Policy] = {"lru": lru, "value": value_density}


def victims(
    missing: int, resident: Iterable[Entry], size: Callable[[Entry], int], policy: Policy
) -> list[Entry] | None:
    """Whose memory together has `missing` bytes, least wanted first; None where all have less."""
    chosen = []
    for entry in sorted(resident, key=lambda one: (*_rank(one), policy(one))):
        if missing <= 0:
            break
        chosen.append(entry)
        missing -= size(entry)
    if missing > 0:
        return None
    for entry in reversed(chosen[:-1]):  # a large one that went last may have made others needless
        if missing + size(entry) <= 0:
            chosen.remove(entry)
            missing += size(entry)
    return chosen


def _rank(entry: Entry) -> tuple[bool, bool, bool, float]:
    """Least first: spare ones, those that nobody asked for, those that are needed last, active ones."""
    return entry.active, not entry.is_spare(), entry.is_wanted(), -entry.deadline()


def may_go(entry: Entry, newcomer: Entry, now: float, active_fit: bool = True) -> bool:
    """Whether it has to make room; `active_fit`: all active ones have room together."""
    entry.forget_demands(now)
    if entry.stays or (entry.active and (active_fit or not newcomer.active)):
        return False
    if entry.is_spare() or (newcomer.active and not entry.active):
        return True
    if entry.is_wanted() and (entry.deadline(), entry.order) <= (newcomer.deadline(), newcomer.order):
        return False
    in_use = now - entry.usage.last < IN_USE_SECONDS
    return not (in_use and now < entry.stays_until())
