"""SLO classes: service level objectives by name, and the adapters that have each.

An objective is a text such as `ttft_p95=250ms,tpot_avg=100ms`. Classes are a mapping, in a file of YAML:

    gold:
      slo: ttft_p99=100ms,tpot_avg=40ms
      adapters: [law, "medical-*"]
"""

from __future__ import annotations

import fnmatch
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from lora_server.errors import ConfigError

OTHERS = "others"  # no class can be called so: it is what `provision` calls the adapters that are in none
MOST_CLASSES = 64
_UNITS_US = {"us": 1.0, "µs": 1.0, "ms": 1e3, "s": 1e6}
_EXAMPLE = "expected such as 'ttft_p95=250ms,tpot_avg=100ms'"
_FORM = "expected a name, and under it `slo: ttft_p99=100ms,tpot_avg=40ms` and `adapters: [NAME or PATTERN, ...]`"
_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,62}[A-Za-z0-9])?", re.ASCII)


@dataclass(frozen=True)
class Slo:
    """TTFT at a percentile (queueing + first decode step, prefill excluded) and average TPOT."""

    ttft_us: float
    percentile: float
    tpot_us: float

    @property
    def share(self) -> float:
        """The percentile as a share of requests, the IAR target unless another is given."""
        return self.percentile / 100

    def __str__(self) -> str:
        return f"ttft_p{self.percentile:g}={self.ttft_us / 1e3:.10g}ms,tpot_avg={self.tpot_us / 1e3:.10g}ms"

    @classmethod
    def parse(cls, text: str) -> Slo:
        """Parse both objectives, in any order; raises ConfigError."""
        values: dict[str, float] = {}
        percentile = 0.0
        for part in filter(None, (piece.strip() for piece in text.split(","))):
            name, sign, value = (piece.strip() for piece in part.partition("="))
            if not sign:
                raise ConfigError(f"got {part!r}, {_EXAMPLE}")
            match = re.fullmatch(r"ttft_p(\d{1,3}(?:\.\d+)?)", name)
            kind = "ttft" if match else name
            if kind not in ("ttft", "tpot_avg"):
                raise ConfigError(f"got {name!r}, expected ttft_pXX (such as ttft_p95) or tpot_avg")
            if kind in values:
                raise ConfigError(f"{kind} is given twice; give one value")
            if match:
                percentile = float(match[1])
                if not 0 < percentile <= 100:
                    raise ConfigError(f"got {name}, expected a percentile above 0 and at most 100")
            values[kind] = _microseconds(name, value)
        for kind, wanted in (("ttft", "ttft_pXX"), ("tpot_avg", "tpot_avg")):
            if kind not in values:
                raise ConfigError(f"no {wanted} in {text!r}, {_EXAMPLE}")
        return cls(values["ttft"], percentile, values["tpot_avg"])


def _microseconds(name: str, value: str) -> float:
    match = re.fullmatch(r"(\d+\.?\d*(?:[eE][+-]?\d+)?|\.\d+)\s*([a-zµ]*)", value)
    if match is None or match[2] not in _UNITS_US:
        raise ConfigError(f"{name}: got {value!r}, expected a number with us, ms or s, such as 250ms")
    number = float(match[1]) * _UNITS_US[match[2]]
    if not 0 < number < float("inf"):
        raise ConfigError(f"{name}: got {value!r}, expected a finite time above 0")
    return number


@dataclass(frozen=True)
class NamedSlo:
    """An SLO class; `adapters` are names and patterns (`*`, `?`, `[...]`) of those that have it by default."""

    name: str
    slo: Slo
    adapters: tuple[str, ...] = ()


class SloClasses(NamedTuple):
    """The classes of a server or a plan."""

    classes: tuple[NamedSlo, ...] = ()

    @classmethod
    def read(cls, file: Path) -> SloClasses:
        """Read a file; raises ConfigError that names it."""
        import yaml

        try:
            content = yaml.safe_load(file.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
            raise ConfigError(f"{file} cannot be read: {' '.join(str(error).split())}") from None
        try:
            return cls.parse(content)
        except ConfigError as error:
            raise ConfigError(f"{file}: {error}") from None

    @classmethod
    def parse(cls, content: Any) -> SloClasses:
        """Make classes of what a file contains; raises ConfigError."""
        if not isinstance(content, dict) or not content:
            raise ConfigError(f"got {type(content).__name__}, {_FORM}")
        if len(content) > MOST_CLASSES:
            raise ConfigError(f"got {len(content)} classes, expected at most {MOST_CLASSES}")
        return cls(tuple(_class(str(name), fields) for name, fields in content.items()))

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """Return what `parse` reads."""
        return {one.name: {"slo": str(one.slo), "adapters": list(one.adapters)} for one in self.classes}

    def find(self, name: str) -> NamedSlo | None:
        """Return the class of a name; None if there is none."""
        return next((one for one in self.classes if one.name == name), None)

    def check(self, name: str) -> None:
        """Raise ConfigError unless the name is empty or a class's."""
        if name and self.find(name) is None:
            known = ", ".join(one.name for one in self.classes) or "none: start the server with --classes FILE"
            raise ConfigError(f"SLO class: got {name[:80]!r}, expected one of the server's --classes ({known})")

    def of_adapter(self, adapter: str) -> NamedSlo | None:
        """Return the first class with a pattern that matches an adapter's full name; None if there is none."""
        matching = (one for one in self.classes if any(fnmatch.fnmatchcase(adapter, each) for each in one.adapters))
        return next(matching, None)


NO_CLASSES = SloClasses()


def _class(name: str, fields: Any) -> NamedSlo:
    if not isinstance(fields, dict) or not {"slo"} <= set(fields) <= {"slo", "adapters"} or name == OTHERS:
        raise ConfigError(f"{name}: got {fields!r}, {_FORM}")
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{name[:80]!r}: expected a name of 1 to 64 letters, digits, '.', '_' and '-'")
    patterns = fields.get("adapters", [])
    if not isinstance(patterns, list) or not all(isinstance(one, str) for one in patterns):
        raise ConfigError(f"{name}: adapters: got {patterns!r}, expected a list of names or patterns")
    try:
        return NamedSlo(name, Slo.parse(str(fields["slo"])), tuple(patterns))
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None
