"""Little's law against a step that takes longer, the more requests there are."""

from __future__ import annotations

from collections.abc import Callable

_PRECISION = 1e-9


def settled_batch(tokens_per_us: float, step_us: Callable[[float], float], most: float) -> float:
    """Find the batch B = tokens_per_us * step(B) that a rate keeps in flight; `most` if it would be that or more.

    step(B) / B falls, so there is one at most: regula falsi on what is too little, with Illinois' halving.
    """
    high, excess = most, most - tokens_per_us * step_us(most)
    if excess <= 0:
        return most
    low, lack = 0.0, tokens_per_us * step_us(0.0)
    last = 0
    while high - low > _PRECISION * high:
        middle = low + (high - low) * lack / (lack + excess)
        over = middle - tokens_per_us * step_us(middle)
        if abs(over) <= _PRECISION * middle:
            return middle
        if over > 0:
            high, excess, lack, last = middle, over, lack / 2 if last > 0 else lack, 1
        else:
            low, lack, excess, last = middle, -over, excess / 2 if last < 0 else excess, -1
    return high
