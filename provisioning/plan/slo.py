"""Service level objectives: `ttft_p95=250ms,tpot_avg=100ms`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from provisioning.inputs import InputError

_UNITS_US = {"us": 1.0, "µs": 1.0, "ms": 1e3, "s": 1e6}
_EXAMPLE = "expected such as 'ttft_p95=250ms,tpot_avg=100ms'"


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


def parse(text: str) -> Slo:
    """Parse both objectives, in any order; raises InputError naming --slo."""
    values: dict[str, float] = {}
    percentile = 0.0
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        name, sign, value = (piece.strip() for piece in part.partition("="))
        if not sign:
            raise InputError(f"--slo: got {part!r}, {_EXAMPLE}")
        match = re.fullmatch(r"ttft_p(\d{1,3}(?:\.\d+)?)", name)
        kind = "ttft" if match else name
        if kind not in ("ttft", "tpot_avg"):
            raise InputError(f"--slo: got {name!r}, expected ttft_pXX (such as ttft_p95) or tpot_avg")
        if kind in values:
            raise InputError(f"--slo: {kind} is given twice; give one value")
        if match:
            percentile = float(match[1])
            if not 0 < percentile <= 100:
                raise InputError(f"--slo: got {name}, expected a percentile above 0 and at most 100")
        values[kind] = _microseconds(name, value)
    for kind, wanted in (("ttft", "ttft_pXX"), ("tpot_avg", "tpot_avg")):
        if kind not in values:
            raise InputError(f"--slo: no {wanted} in {text!r}, {_EXAMPLE}")
    return Slo(values["ttft"], percentile, values["tpot_avg"])


def _microseconds(name: str, value: str) -> float:
    match = re.fullmatch(r"(\d+\.?\d*(?:[eE][+-]?\d+)?|\.\d+)\s*([a-zµ]*)", value)
    if match is None or match[2] not in _UNITS_US:
        raise InputError(f"--slo: {name}: got {value!r}, expected a number with us, ms or s, such as 250ms")
    number = float(match[1]) * _UNITS_US[match[2]]
    if not 0 < number < float("inf"):
        raise InputError(f"--slo: {name}: got {value!r}, expected a finite time above 0")
    return number
