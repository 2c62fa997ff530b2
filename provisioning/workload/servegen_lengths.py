"""ServeGen's `chunk-N-dataset.json`: which output lengths a client's requests have, from some moment on.

The file maps the start of a period (s) to {"output_tokens": "{tokens: share, ...}", ...}. A period without requests
has no shares.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from provisioning.arrays import Floats, Ints
from provisioning.inputs import InputError, normalised, parsed, text_of

_MOST_TOKENS = 2**31
_EXPECTED = 'expected {"0": {"output_tokens": "{12: 0.5, 34: 0.5}"}, ...}, periods by their start in seconds'


@dataclass(frozen=True, eq=False)
class Period:
    """Output lengths from `start_s` on: tokens_K[k] with probability share_K[k]."""

    start_s: float
    tokens_K: Ints
    share_K: Floats

    @property
    def mean(self) -> float:
        """Tokens of a request."""
        return float(self.tokens_K @ self.share_K)

    def sample(self, rng: np.random.Generator, num: int) -> Ints:
        """Sample output lengths of at least one token."""
        return rng.choice(self.tokens_K, num, p=self.share_K)


def at(periods: tuple[Period, ...], start_s: float) -> Period:
    """Return the period that a moment lies in; the first one before it begins."""
    return next((period for period in reversed(periods) if period.start_s <= start_s), periods[0])


def read(file: Path) -> tuple[Period, ...]:
    """Read the periods that have requests, in order; none if the file does not exist. Raises InputError naming it."""
    where = f"--trace: {file}"
    if not file.exists():
        return ()
    found = parsed(text_of(file, where, "utf-8-sig"), where)
    if not isinstance(found, dict):
        raise InputError(f"{where}: got {type(found).__name__}, {_EXPECTED}")
    periods = (_period(start, fields, where) for start, fields in found.items())
    return tuple(sorted((period for period in periods if period is not None), key=lambda period: period.start_s))


def _period(start: str, fields: Any, where: str) -> Period | None:
    try:
        shares = fields["output_tokens"]
        pairs = shares.items() if isinstance(shares, dict) else _pairs(shares)
        by_tokens = {int(tokens): float(share) for tokens, share in pairs}
        start_s, bad = float(start), [tokens for tokens in by_tokens if not 0 <= tokens <= _MOST_TOKENS]
    except (KeyError, TypeError, ValueError, AttributeError):
        raise InputError(f"{where}: period {start!r} cannot be used, {_EXPECTED}") from None
    if not np.isfinite(start_s) or bad:
        raise InputError(f"{where}: period {start!r}: got {bad[:1] or start}, {_EXPECTED}")
    if not by_tokens:
        return None
    tokens_K = np.maximum(np.array(list(by_tokens), dtype=np.int64), 1)
    return Period(start_s, tokens_K, normalised(list(by_tokens.values()), f"{where}: period {start!r}"))


def _pairs(text: str) -> list[list[str]]:
    inner = text.strip()
    if not (inner.startswith("{") and inner.endswith("}")):
        raise ValueError
    return [pair.split(":") for pair in inner[1:-1].split(",") if inner[1:-1].strip()]
