"""Steps of a serving engine, measured by `lora-server profile-vllm`: how long one takes by what it computes.

JSON: {"source": "...", "of": {"engine": "vllm 0.32.0", "model": "8x1024-...", "lora_ranks": [8, 64], "engine_args":
{"max_num_seqs": 32}}, "engines": [{"lora": "coupled", "slots": 4, "threads": 2, "max_num_seqs": 32,
"max_num_batched_tokens": 2048, "entry_us": 9000, "load_us": 21000, "decode": [{"batch": 1, "us": 21000}, ...],
"prompt": [{"tokens": 1, "us": 21000}, ...]}, ...]}
`lora` is base, server or coupled; `load_us` has a coupled one with fewer slots than adapters. `max_num_seqs` and
`max_num_batched_tokens` are those in effect: vLLM's defaults differ by device. A step of decoding requests and prompts
takes what the decoding alone takes, and what the prompt tokens take beyond one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from provisioning.inputs import InputError, parsed

KINDS = ("base", "server", "coupled")


@dataclass(frozen=True, kw_only=True)
class EngineSteps:
    """One way to serve. `decode` and `prompt` are (requests or tokens, s) by size."""

    decode: tuple[tuple[float, float], ...]
    prompt: tuple[tuple[float, float], ...]
    entry_s: float
    load_s: float
    max_seqs: int
    max_tokens: int

    def step_s(self, decoding: int, prompt_tokens: int) -> float:
        """Compute the time of a step in which some requests decode and prompts have so many tokens in all."""
        if not decoding:
            return _on_line(self.prompt, prompt_tokens)
        more_s = _on_line(self.prompt, prompt_tokens) - _on_line(self.prompt, 1) if prompt_tokens else 0.0
        return _on_line(self.decode, decoding) + max(more_s, 0.0)


def _on_line(points: Sequence[tuple[float, float]], at: float) -> float:
    """Interpolate, and continue along the last two points."""
    sizes, times = zip(*points, strict=True)
    if at <= sizes[-1] or len(points) == 1:
        return float(np.interp(at, sizes, times))
    slope = max((times[-1] - times[-2]) / (sizes[-1] - sizes[-2]), 0.0)
    return float(times[-1] + slope * (at - sizes[-1]))


def load(path: Path, kind: str, slots: int) -> EngineSteps:
    """Read the steps of one way to serve; of coupled engines, of the number of slots that is nearest.

    Raises InputError that begins with --engine-profile.
    """
    where = f"--engine-profile: {path}"
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{where} cannot be read: {error}") from None
    content = parsed(text, where)
    engines = content.get("engines") if isinstance(content, dict) else None
    if not isinstance(engines, list) or not all(isinstance(one, dict) for one in engines):
        raise InputError(f'{where}: expected an object with "engines", as `lora-server profile-vllm` writes it')
    found = [one for one in engines if one.get("lora") == kind]
    if not found:
        raise InputError(f"{where}: got no engine with lora {kind!r}, expected one; measure it with profile-vllm")
    try:
        found.sort(key=lambda one: abs(int(one["slots"]) - slots))
        nearest = found[0]
        steps = EngineSteps(
            decode=_points(nearest["decode"], "batch"),
            prompt=_points(nearest["prompt"], "tokens"),
            entry_s=float(nearest["entry_us"]) * 1e-6,
            load_s=_load_us(found) * 1e-6 if kind == "coupled" else 0.0,
            max_seqs=int(nearest["max_num_seqs"]),
            max_tokens=int(nearest["max_num_batched_tokens"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise InputError(f"{where}: {kind}: {error!r}; expected what `lora-server profile-vllm` writes") from None
    numbers = [*steps.decode, *steps.prompt, (1.0, steps.entry_s + 1), (1.0, steps.load_s + 1)]
    if not all(0 < value < math.inf for pair in numbers for value in pair) or min(steps.max_seqs, steps.max_tokens) < 1:
        raise InputError(f"{where}: {kind}: expected sizes and times above 0")
    return steps


def _load_us(engines: Sequence[dict[str, Any]]) -> float:
    """Take the first that was measured: an engine with a slot for each adapter loads none twice."""
    found = [float(one["load_us"]) for one in engines if "load_us" in one]
    if not found:
        raise ValueError("no load_us; measure an engine with fewer slots than adapters")
    return found[0]


def _points(rows: Any, size: str) -> tuple[tuple[float, float], ...]:
    found = tuple(sorted((float(row[size]), float(row["us"]) * 1e-6) for row in rows))
    if not found or len({at for at, _ in found}) < len(found):
        raise ValueError(f"expected one row or more for each {size}")
    return found
