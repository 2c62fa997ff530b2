"""A profile: times measured by bench/ on the machines at hand; they override the model, term by term.

JSON: {"source": "h200_2026-11-21", "of": {"model": "mixtral-8x7b", "gpu": "h200", "lora_rank": 64, "wire": "exact",
"transport": "gpu"}, "terms": {"receive": [{"ep": 2, "batch": 64, "us": 131.0}, ...],
"compute": [...], "send": [...], "base_ffn": [{"batch": 64, "us": 210.0}], "base_attention": [...]}}
`of` is what was measured, with "link_gbps" where a link was; a question that differs in any of it is refused. A profile
in `profiles/`, a folder of this package, is used without being asked for where it fits the question.

Times are of one layer (gate_up and down together) for one instance's batch. A batch between or beyond
the measured ones of the same ep is interpolated, or continued along the last two points.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from provisioning.inputs import InputError, parsed

OF = {"model": "--model", "gpu": "--gpu", "lora_rank": "--lora-rank", "wire": "--wire", "transport": "--transport"}
_MAY = {"link_gbps": "--link-gbps"}
TERMS = ("receive", "compute", "send", "base_ffn", "base_attention")


class Quantity(NamedTuple):
    """A number and where it comes from: kind is measured, extrapolated or assumed."""

    value: float
    kind: str
    source: str


@dataclass(frozen=True)
class Profile:
    """points[term][ep] is a list of (batch, us) by batch; ep is 0 for the base model's terms.

    `of` says what was measured.
    """

    source: str = ""
    points: Mapping[str, Mapping[int, list[tuple[float, float]]]] = field(default_factory=dict)
    of: Mapping[str, Any] = field(default_factory=dict)

    def differs(self, asked: Mapping[str, Any]) -> str | None:
        """Return the first setting of the question that differs from the profile's; None if it fits."""
        return next((name for name, value in self.of.items() if value != asked[name]), None)

    def checked(self, asked: Mapping[str, Any]) -> Profile:
        """Return the profile if it fits the question; raises InputError otherwise."""
        name = self.differs(asked)
        if name is not None:
            flag = (OF | _MAY)[name]
            raise InputError(
                f"--profile: {self.source}: measured with {name} {self.of[name]}, the question has {asked[name]}; "
                f"give {flag} {self.of[name]}, or a profile of {asked[name]}"
            )
        return self

    def lookup(self, term: str, *, batch: float, ep: int = 0) -> Quantity | None:
        """Return the measured time, or one extrapolated from it; None if nothing was measured for this ep."""
        known = self.points.get(term, {}).get(ep)
        if not known:
            return None
        for at, us in known:
            if at == batch:
                return Quantity(us, "measured", self.source)
        if len(known) == 1:
            return None
        after = next((index for index, (at, _) in enumerate(known) if at > batch), len(known) - 1)
        (left, low), (right, high) = known[max(after, 1) - 1], known[max(after, 1)]
        value = low + (high - low) * (batch - left) / (right - left)
        value = value if value > 0 else min(low, high)  # a line that falls below zero says no more than what was seen
        return Quantity(value, "extrapolated", f"{self.source}, batch {left:g} and {right:g}")


def shipped(asked: Mapping[str, Any], folder: Path | None = None) -> Profile:
    """Return the package's profile that fits a question; an empty profile if none does."""
    files = sorted((folder or Path(__file__).with_name("profiles")).glob("*.json"))
    return next((found for found in map(load, files) if found.differs(asked) is None), Profile())


def load(path: str | Path) -> Profile:
    """Read a profile; raises InputError that names --profile, the term and what was expected."""
    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--profile: {file} cannot be read: {error}") from None
    content = parsed(text, f"--profile: {file}")
    if not isinstance(content, dict) or not isinstance(content.get("terms"), dict):
        raise InputError(f'--profile: {file}: expected an object with "source" and "terms", as bench/ writes it')
    of = content.get("of")
    if not isinstance(of, dict) or not set(OF) <= set(of) <= set(OF | _MAY):
        raise InputError(f"--profile: {file}: of: got {of!r}, expected what was measured: {', '.join(OF)}")
    points: dict[str, dict[int, list[tuple[float, float]]]] = {}
    for term, rows in content["terms"].items():
        if term not in TERMS or not isinstance(rows, list):
            raise InputError(f"--profile: {file}: got term {term!r}, expected a list under one of {', '.join(TERMS)}")
        for row in rows:
            ep, batch, us = _point(row, f"--profile: {file}: {term}", base=term.startswith("base"))
            points.setdefault(term, {}).setdefault(ep, []).append((batch, us))
    for series in points.values():
        for known in series.values():
            known.sort()
            if len({batch for batch, _ in known}) < len(known):
                raise InputError(f"--profile: {file}: a batch size occurs twice for one term and ep; keep one")
    return Profile(f"{file.name}: {content.get('source', 'no source given')}", points, of)


def _point(row: Any, where: str, *, base: bool) -> tuple[int, float, float]:
    try:
        ep, batch, us = 0.0 if base else float(row["ep"]), float(row["batch"]), float(row["us"])
    except (KeyError, TypeError, ValueError, OverflowError):
        wanted = '{"batch": b, "us": t}' if base else '{"ep": x, "batch": b, "us": t}'
        raise InputError(f"{where}: got {row!r}, expected {wanted}") from None
    if not (0 < batch < math.inf and 0 < us < math.inf and (base or ep >= 1) and ep.is_integer()):
        raise InputError(f"{where}: got {row!r}, expected batch and us above 0, and a whole ep of 1 or more")
    return int(ep), batch, us
