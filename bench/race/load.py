"""The requests of a row, and what an engine process reports about each of them."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np

from provisioning.workload import traces
from provisioning.workload.workload import zipf

PROMPT_TOKENS, NEW_TOKENS = (16, 96), (16, 48)  # uniform
TOKEN_DIVISOR = 16  # of a trace's lengths, which are those of models a hundred times as fast as this one
ZIPF = 1.0
TRACES = {
    "azure conv": "AzureLLMInferenceTrace_conv_2023.csv",
    "azure code": "AzureLLMInferenceTrace_code_2023.csv",
}


class Call(msgspec.Struct):
    """A request, and the second `at` which it arrives; a closed loop ignores that."""

    at: float
    adapter: str | None
    prompt: list[int]
    new_tokens: int


class Job(msgspec.Struct):
    """The calls of one row. `width` 0: each is sent when it arrives; else as many are kept in flight, in turn.

    Calls that are not complete after `seconds` are aborted.
    """

    calls: list[Call]
    width: int
    seconds: float


class Seen(msgspec.Struct):
    """The outcome of a call: when it was due, was sent and got each token, in seconds from the job's start."""

    call: int
    due: float
    sent: float
    times: list[float] = []
    tokens: list[int] = []
    failure: str = ""


def names(sites: str, count: int) -> list[str]:
    """Name the adapters of some sites; the first one is asked for most often."""
    return [f"{sites}-{number:03}" for number in range(count)]


def poisson(adapters: Sequence[str], rate: float, seconds: float, seed: int) -> list[Call]:
    """Draw the `rate * seconds` arrivals of a Poisson process; the adapters follow Zipf's law."""
    dice = np.random.default_rng(seed)
    at = np.sort(dice.uniform(0.0, seconds, max(1, round(rate * seconds))))
    return [_call(dice, time, adapters, *_lengths(dice)) for time in at.tolist()]


def supply(adapters: Sequence[str], count: int, seed: int) -> list[Call]:
    """Draw calls for a closed loop."""
    dice = np.random.default_rng(seed)
    return [_call(dice, 0.0, adapters, *_lengths(dice)) for _ in range(count)]


def compressed(file: Path, adapters: Sequence[str], rate: float, seconds: float, seed: int) -> list[Call]:
    """Take a trace's first arrivals, at `rate` on average, and its lengths divided by TOKEN_DIVISOR, within bounds."""
    dice = np.random.default_rng(seed)
    requests, _ = traces.read(file)
    count = max(2, round(rate * seconds))
    at = requests.arrival_s[:count] - requests.arrival_s[0]
    at = at * seconds / max(float(at[-1]), 1e-9)
    assert requests.input_tokens is not None
    lengths = zip(requests.input_tokens[:count].tolist(), requests.output_tokens[:count].tolist(), strict=True)
    return [
        _call(dice, time, adapters, _within(given, 4, 192), _within(made, 4, 64))
        for time, (given, made) in zip(at.tolist(), lengths, strict=True)
    ]


def every(adapters: Sequence[str | None]) -> list[Call]:
    """Make one short call of every adapter, so that an engine has read each before it is measured."""
    return [Call(0.0, name, [5, 6, 7], 2) for name in adapters]


def _lengths(dice: np.random.Generator) -> tuple[int, int]:
    return int(dice.integers(*PROMPT_TOKENS)), int(dice.integers(*NEW_TOKENS))


def _within(tokens: int, least: int, most: int) -> int:
    return min(max(tokens // TOKEN_DIVISOR, least), most)


def _call(dice: np.random.Generator, at: float, adapters: Sequence[str], prompt: int, new_tokens: int) -> Call:
    adapter = adapters[int(dice.choice(len(adapters), p=zipf(ZIPF, len(adapters))))]
    return Call(float(at), adapter, dice.integers(3, 250, prompt).tolist(), new_tokens)


def repeated(calls: Sequence[Call]) -> Iterator[tuple[int, Call]]:
    """Yield (number, call) of all calls, over and over."""
    return itertools.cycle(enumerate(calls))


def answer(seen: Sequence[Seen]) -> None:
    """Write a job's outcome to the descriptor that the command line names; engines print to stdout."""
    with os.fdopen(os.dup(int(sys.argv[1])), "wb") as stream:
        stream.write(msgspec.json.encode(seen) + b"\n")
