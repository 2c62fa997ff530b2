"""A profile: times measured on the machines at hand by `lora-server profile`; they override the model, term by term.

JSON: {"source": "h200_2026-11-21", "of": {"model": "mixtral-8x7b", "gpu": "h200", "lora_rank": 64, "wire": "exact",
"transport": "gpu"}, "terms": {"receive": [{"ep": 2, "batch": 64, "us": 131.0}, ...],
"compute": [...], "send": [...], "base_ffn": [{"batch": 64, "us": 210.0}], "base_attention": [...]}}
`of` is what was measured, with "link_gbps" where a link was, and the model by name or by geometry; a question that
differs in any of it is refused. A profile in `profiles/`, a folder of this package, is used without being asked for
where it fits the question.

Times are of one layer (gate_up and down together) for one instance's batch, where "engines" step at once (1, unless
said). A batch between or beyond the measured ones of the same ep is interpolated, or continued along the last two
points, and so is a number of engines. "exposed" is what a layer takes beyond attention and the longer of FFN and LoRA
step: what does not overlap, and what the engine itself does for an exchange. Terms with "prompt_" are of a prompt chunk
of "batch" tokens. "machine", where there is one, stands for the preset: see `MeasuredMachine`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

from provisioning.inputs import InputError, parsed, text_of

OF = {"model": "--model", "gpu": "--gpu", "lora_rank": "--lora-rank", "wire": "--wire", "transport": "--transport"}
_MAY = {"link_gbps": "--link-gbps"}
_STEP = ("receive", "compute", "send", "exposed")
TERMS = (*_STEP, "base_ffn", "base_attention", *(f"prompt_{term}" for term in (*_STEP, "ffn", "attention")))
_OF_SERVER = {term for term in TERMS if term.endswith(_STEP)}


class Quantity(NamedTuple):
    """A number and where it comes from: kind is measured, extrapolated or assumed."""

    value: float
    kind: str
    source: str


@dataclass(frozen=True, kw_only=True)
class MeasuredMachine:
    """A machine that no preset describes: memory for one process, its rates, and how fast adapters are loaded."""

    memory_gib: float
    memory_gb_per_s: float
    tflops: float
    load_gb_per_s: float


_Points = list[tuple[float, float]]


@dataclass(frozen=True)
class Profile:
    """points[term][ep, engines] is a list of (batch, us) by batch; ep is 0 for the base model's terms.

    `of` says what was measured.
    """

    source: str = ""
    points: Mapping[str, Mapping[tuple[int, int], _Points]] = field(default_factory=dict)
    of: Mapping[str, Any] = field(default_factory=dict)
    machine: MeasuredMachine | None = None

    def knows(self, ep: int) -> bool:
        """Whether a layout of this ep can be planned: of a machine without a preset, only those that were measured."""
        return self.machine is None or any(at == ep for at, _ in self.points.get("compute", {}))

    def differs(self, asked: Mapping[str, Any]) -> str | None:
        """Return the first setting of the question that differs from the profile's; None if it fits."""
        given = {name: value for name, value in self.of.items() if name in asked}
        return next((name for name, value in given.items() if value not in _alike(name, asked)), None)

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

    def lookup(self, term: str, *, batch: float, ep: int = 0, engines: int = 1) -> Quantity | None:
        """Return the measured time, or one extrapolated from it; None if nothing was measured for this ep."""
        by_engines = {number: known for (at, number), known in self.points.get(term, {}).items() if at == ep}
        if engines in by_engines or len(by_engines) == 1:
            return self._at(by_engines.get(engines) or next(iter(by_engines.values())), batch)
        found = [(float(number), self._at(known, batch)) for number, known in sorted(by_engines.items())]
        seen = [(number, us.value) for number, us in found if us is not None]
        if len(seen) < 2:
            return None
        value, near = _line(seen, engines)
        return Quantity(value, "extrapolated", f"{self.source}, {near} engines")

    def _at(self, known: _Points, batch: float) -> Quantity | None:
        for at, us in known:
            if at == batch:
                return Quantity(us, "measured", self.source)
        if len(known) == 1:
            return None
        value, near = _line(known, batch)
        return Quantity(value, "extrapolated", f"{self.source}, batch {near}")


def _alike(name: str, asked: Mapping[str, Any]) -> Sequence[Any]:
    """Return the question's values: a model has a name and a geometry."""
    return (asked["model"], asked.get("geometry")) if name == "model" else (asked[name],)


def _line(points: _Points, at: float) -> tuple[float, str]:
    """Return the value on the line through the two points about `at`, or the last two, and what these are."""
    after = next((index for index, (x, _) in enumerate(points) if x > at), len(points) - 1)
    (left, low), (right, high) = points[max(after, 1) - 1], points[max(after, 1)]
    value = low + (high - low) * (at - left) / (right - left)
    return (value if value > 0 else min(low, high)), f"{left:g} and {right:g}"  # below zero, a line says no more


def shipped(asked: Mapping[str, Any], folder: Path | None = None) -> Profile:
    """Return the package's profile that fits a question; an empty profile if none does."""
    files = sorted((folder or Path(__file__).with_name("profiles")).glob("*.json"))
    return next((found for found in map(load, files) if found.differs(asked) is None), Profile())


def load(file: Path) -> Profile:
    """Read a profile; raises InputError that names --profile, the term and what was expected."""
    content = parsed(text_of(file, f"--profile: {file}"), f"--profile: {file}")
    if not isinstance(content, dict) or not isinstance(content.get("terms"), dict):
        raise InputError(f'--profile: {file}: expected an object with "source" and "terms", as bench/ writes it')
    of = content.get("of")
    if not isinstance(of, dict) or not set(OF) <= set(of) <= set(OF | _MAY):
        raise InputError(f"--profile: {file}: of: got {of!r}, expected what was measured: {', '.join(OF)}")
    points: dict[str, dict[tuple[int, int], _Points]] = {}
    for term, rows in content["terms"].items():
        if term not in TERMS or not isinstance(rows, list):
            raise InputError(f"--profile: {file}: got term {term!r}, expected a list under one of {', '.join(TERMS)}")
        for row in rows:
            key, batch, us = _point(row, f"--profile: {file}: {term}", base=term not in _OF_SERVER)
            points.setdefault(term, {}).setdefault(key, []).append((batch, us))
    for series in points.values():
        for known in series.values():
            known.sort()
            if len({batch for batch, _ in known}) < len(known):
                raise InputError(f"--profile: {file}: a batch size occurs twice for one term, ep and engines; keep one")
    machine = None if content.get("machine") is None else _machine(content["machine"], f"--profile: {file}: machine")
    return Profile(f"{file.name}: {content.get('source', 'no source given')}", points, of, machine)


def _machine(given: Any, where: str) -> MeasuredMachine:
    try:
        found = MeasuredMachine(**{name: float(value) for name, value in given.items()})
    except (AttributeError, TypeError, ValueError, OverflowError):
        names = ", ".join(one.name for one in fields(MeasuredMachine))
        raise InputError(f"{where}: got {given!r}, expected numbers for {names}") from None
    for name, value in vars(found).items():
        if not (math.isfinite(value) and value > 0):
            raise InputError(f"{where}: {name}: got {value:g}, expected a number above 0")
    return found


def _point(row: Any, where: str, *, base: bool) -> tuple[tuple[int, int], float, float]:
    try:
        ep, batch, us = 0.0 if base else float(row["ep"]), float(row["batch"]), float(row["us"])
        engines = float(row.get("engines", 1))
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError):
        wanted = '{"batch": b, "us": t}' if base else '{"ep": x, "batch": b, "us": t}'
        raise InputError(f"{where}: got {row!r}, expected {wanted}") from None
    whole = (base or ep >= 1) and ep.is_integer() and engines >= 1 and engines.is_integer()
    if not (0 < batch < math.inf and 0 < us < math.inf and whole):
        raise InputError(f"{where}: got {row!r}, expected batch and us above 0, and whole ep and engines of 1 or more")
    return (int(ep), int(engines)), batch, us
