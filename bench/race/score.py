"""From the outcomes of a job to a row of figures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from bench.race.load import Job, Seen

TTFT_SECONDS, TPOT_SECONDS, ENOUGH = 2.0, 0.25, 0.9  # the SLO, and the share of requests that has to be within
LATE_SECONDS = 0.1  # p99 of how late requests were sent, beyond which a row says so
Row = dict[str, Any]


def row(job: Job, seen: Sequence[Seen]) -> Row:
    """Score a job.

    Open loop: a call without a token counts with the time until the end, and as outside the SLO. Closed loop: only
    complete calls have times, since the end cuts others off.
    """
    by_call = [one for one in seen if _is_complete(job, one)] if job.width else _all(job, seen)
    first = [(one.times[0] if one.times else job.seconds) - one.due for one in by_call]
    gaps = [gap for one in by_call if (gap := _tpot(one)) is not None]
    done = [one for one in by_call if _is_complete(job, one)]
    within = [one for one in done if one.times[0] - one.due <= TTFT_SECONDS and (_tpot(one) or 0.0) <= TPOT_SECONDS]
    late = float(np.percentile([one.sent - one.due for one in by_call], 99)) if by_call else 0.0
    ends = max((one.times[-1] for one in by_call if one.times), default=job.seconds)
    ends = job.seconds if job.width else ends
    return {
        "calls": len(by_call),
        "complete": len(done),
        "failed": sum(bool(one.failure) for one in seen),
        "within": len(within) / max(1, len(by_call)),
        "tokens_per_s": sum(time <= ends for one in seen for time in one.times) / ends,
        "late_p99_s": late,
        "is_late": late > LATE_SECONDS,
        **_percentiles("ttft", first),
        **_percentiles("tpot", gaps),
    }


def compare(seen: Sequence[Seen], other: Sequence[Seen]) -> tuple[int, int]:
    """Count the calls that gave both systems all tokens that the shorter answer has, and those that both answered."""
    mine, theirs = _answers(seen), _answers(other)
    both = mine.keys() & theirs.keys()
    return sum(_agree(mine[one], theirs[one]) for one in both), len(both)


def highest_rate(rows: Iterable[Mapping[str, Any]]) -> float:
    """Return the highest rate up to which every row has ENOUGH requests within the SLO; 0 if none has."""
    best = 0.0
    for one in sorted(rows, key=lambda one: float(one["rate"])):
        if one["within"] < ENOUGH:
            break
        best = float(one["rate"])
    return best


def _all(job: Job, seen: Sequence[Seen]) -> list[Seen]:
    """Add the calls that were never sent, as a batch was running until the end."""
    sent = {one.call for one in seen}
    missing = [(one, call.at) for one, call in enumerate(job.calls) if one not in sent]
    return [*seen, *(Seen(one, at, job.seconds) for one, at in missing)]


def _is_complete(job: Job, one: Seen) -> bool:
    return not one.failure and len(one.tokens) == job.calls[one.call].new_tokens


def _tpot(one: Seen) -> float | None:
    return (one.times[-1] - one.times[0]) / (len(one.times) - 1) if len(one.times) > 1 else None


def _answers(seen: Sequence[Seen]) -> dict[int, list[int]]:
    """Return the longest answer of each call; a closed loop makes some calls again."""
    return {one.call: one.tokens for one in sorted(seen, key=lambda one: len(one.tokens)) if one.tokens}


def _agree(mine: Sequence[int], theirs: Sequence[int]) -> bool:
    shared = min(len(mine), len(theirs))
    return mine[:shared] == theirs[:shared]


def _percentiles(name: str, values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {f"{name}_p{one}_s": float("nan") for one in (50, 95, 99)}
    return {f"{name}_p{one}_s": float(np.percentile(values, one)) for one in (50, 95, 99)}
