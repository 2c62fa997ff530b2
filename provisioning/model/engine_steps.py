"""Steps of a serving engine, measured by `lora-server profile-vllm`: how long one takes by what it computes.

JSON: {"source": "...", "of": {"engine": "vllm 0.32.0", "model": "8x1024-...", "lora_ranks": [8, 64], "engine_args":
{"max_num_seqs": 32}}, "engines": [{"lora": "coupled", "slots": 4, "threads": 2, "max_num_seqs": 32,
"max_num_batched_tokens": 2048, "entry_us": 9000, "load_us": 21000,
"decode": [{"batch": 8, "adapters": 8, "us": 21000}, ...], "prompt": [{"tokens": 1, "us": 21000}, ...]}, ...]}
`lora` is base, server or coupled; `load_us` has a coupled one with fewer slots than adapters. `max_num_seqs` and
`max_num_batched_tokens` are those in effect: vLLM's defaults differ by device. Where a batch was decoded with several
numbers of adapters, each one fewer saves time. A step of decoding requests and prompts takes what the decoding alone
takes, and what as many tokens more add to a prompt as long as the batch.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from provisioning.inputs import InputError, parsed, text_of

Kind = Literal["base", "server", "coupled"]
Points = tuple[tuple[float, float], ...]


@dataclass(frozen=True, kw_only=True)
class EngineSteps:
    """One way to serve. `decode` and `prompt` are (requests or tokens, s) by size.

    `decode` is of as many adapters as there can be, `most_adapters` or one a request; each one fewer saves `adapter`,
    but no step takes less than one with a single request of each adapter.
    """

    decode: Points
    prompt: Points
    entry_s: float
    load_s: float
    max_seqs: int
    max_tokens: int
    adapter: Points = ((1.0, 0.0),)
    most_adapters: int = 1

    def step_s(self, decoding: int, prompt_tokens: int, adapters: int) -> float:
        """Compute the time of a step in which some requests decode and prompts have so many tokens in all.

        `adapters` are those of all these requests.
        """
        if not decoding:
            return _on_line(self.prompt, prompt_tokens)
        fewer = max(min(decoding, self.most_adapters) - adapters, 0)
        saved_s = fewer * _on_line(self.adapter, min(decoding, self.adapter[-1][0]))
        least_s = _on_line(self.decode, min(adapters, decoding))
        decode_s = max(_on_line(self.decode, decoding) - saved_s, least_s)
        more_s = _on_line(self.prompt, decoding + prompt_tokens) - _on_line(self.prompt, decoding)
        return decode_s + max(more_s, 0.0)

    def scaled(self, factor: float) -> EngineSteps:
        """Return steps that take `factor` times as long."""
        decode, prompt, adapter = (
            tuple((size, s * factor) for size, s in points) for points in (self.decode, self.prompt, self.adapter)
        )
        return replace(self, decode=decode, prompt=prompt, adapter=adapter)


def _on_line(points: Points, at: float) -> float:
    """Interpolate, and continue along the last two points; before the first, nothing changes."""
    after = min(bisect_left(points, (at,)), len(points) - 1)
    if at <= points[0][0] or not after:
        return points[0][1]
    (low, low_s), (high, high_s) = points[after - 1 : after + 1]
    slope = (high_s - low_s) / (high - low)
    return high_s + (slope if at < high else max(slope, 0.0)) * (at - high)


@dataclass(frozen=True, eq=False, kw_only=True)
class EngineProfile:
    """A profile as it was read; `of` says what was measured."""

    where: str
    source: str
    of: Mapping[str, Any]
    engines: Sequence[Mapping[str, Any]]

    def check(self, geometry: str, lora_rank: float) -> None:
        """Raise InputError where another model was measured, or other ranks."""
        model, ranks = self.of.get("model"), self.of.get("lora_ranks")
        if model != geometry:
            raise InputError(f"{self.where}: measured with model {model}, the question has {geometry}")
        known = [one for one in ranks if isinstance(one, int | float)] if isinstance(ranks, list) else []
        if not known or not min(known) <= lora_rank <= max(known):
            raise InputError(f"{self.where}: measured with LoRA ranks {ranks}, the question has {lora_rank:g}")

    def steps(self, kind: Kind, slots: int = 0) -> EngineSteps:
        """Return the steps of one way to serve; of coupled engines, of the number of slots that is nearest."""
        found = [one for one in self.engines if one.get("lora") == kind]
        if not found:
            how = "profile-vllm --slots" if kind == "coupled" else "profile-vllm"
            raise InputError(f"{self.where}: got no engine with lora {kind!r}, expected one; measure it with {how}")
        try:
            found.sort(key=lambda one: abs(int(one["slots"]) - slots))
            nearest = found[0]
            decode, saved, most_adapters = _decode(nearest["decode"])
            steps = EngineSteps(
                decode=decode,
                adapter=saved,
                most_adapters=most_adapters,
                prompt=_points((row["tokens"], row["us"]) for row in nearest["prompt"]),
                entry_s=float(nearest["entry_us"]) * 1e-6,
                load_s=_load_us(found) * 1e-6 if kind == "coupled" else 0.0,
                max_seqs=int(nearest["max_num_seqs"]),
                max_tokens=int(nearest["max_num_batched_tokens"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise InputError(
                f"{self.where}: {kind}: {error!r}; expected what `lora-server profile-vllm` writes"
            ) from None
        numbers = [*steps.decode, *steps.prompt, (1.0, steps.entry_s + 1), (1.0, steps.load_s + 1)]
        least = min(steps.max_seqs, steps.max_tokens, steps.most_adapters)
        if not all(0 < value < math.inf for pair in numbers for value in pair) or least < 1:
            raise InputError(f"{self.where}: {kind}: expected sizes and times above 0")
        return steps


def read(path: Path) -> EngineProfile:
    """Read a profile; raises InputError that begins with --engine-profile."""
    where = f"--engine-profile: {path}"
    content = parsed(text_of(path, where), where)
    engines = content.get("engines") if isinstance(content, dict) else None
    if not isinstance(engines, list) or not all(isinstance(one, dict) for one in engines):
        raise InputError(f'{where}: expected an object with "engines", as `lora-server profile-vllm` writes it')
    of, source = content.get("of"), content.get("source", "no source given")
    return EngineProfile(
        where=where, source=f"{path.name}: {source}", of=of if isinstance(of, dict) else {}, engines=engines
    )


def _load_us(engines: Sequence[Mapping[str, Any]]) -> float:
    """Take the first that was measured: an engine with a slot for each adapter loads none twice."""
    found = [float(one["load_us"]) for one in engines if "load_us" in one]
    if not found:
        raise ValueError("no load_us; measure an engine with fewer slots than adapters")
    return found[0]


def _decode(rows: Any) -> tuple[Points, Points, int]:
    """Return the steps of the most adapters, what one fewer saves, by batch, and how many adapters there were."""
    by_batch: dict[float, list[tuple[float, float]]] = {}
    for row in rows:
        by_batch.setdefault(row["batch"], []).append((row.get("adapters", 1), row["us"]))
    lines = {batch: _points(found) for batch, found in by_batch.items()}
    most = _points((batch, line[-1][1] * 1e6) for batch, line in lines.items())
    saved = tuple(
        (float(batch), max((line[-1][1] - line[0][1]) / (line[-1][0] - line[0][0]), 0.0))
        for batch, line in sorted(lines.items())
        if len(line) > 1
    )
    return most, saved or ((1.0, 0.0),), int(max(line[-1][0] for line in lines.values()))


def _points(pairs: Iterable[tuple[Any, Any]]) -> Points:
    """Sort pairs of a size and us; in seconds."""
    found = tuple(sorted((float(size), float(us) * 1e-6) for size, us in pairs))
    if not found or len({size for size, _ in found}) < len(found):
        raise ValueError(f"expected one row or more, each of another size, got {[size for size, _ in found]}")
    return found
