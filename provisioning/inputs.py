"""Validation of what a user gives: one-line errors that name the argument or the flag."""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Callable, Mapping, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from lora_server.errors import ConfigError

if TYPE_CHECKING:
    from provisioning.arrays import Floats

Found = TypeVar("Found")
Word = TypeVar("Word", bound=str)


class InputError(ConfigError, ValueError):
    """A number, a flag or a file of the planner that cannot be used; a ConfigError and a ValueError."""


def normalised(popularity: Any, name: str = "popularity") -> Floats:
    """Return probabilities in proportion to any non-negative weights; zeros stay. Raises InputError."""
    import numpy as np  # here and below: the command imports this module for --help, too

    try:
        weights_N = np.asarray(_numbers(popularity), dtype=float)
    except (TypeError, ValueError, OverflowError) as error:
        raise InputError(f"{name}: expected a sequence of numbers, got {type(popularity).__name__} ({error})") from None
    if weights_N.ndim != 1 or weights_N.size == 0:
        raise InputError(f"{name}: expected a non-empty one-dimensional sequence, got shape {weights_N.shape}")
    bad = np.flatnonzero(~np.isfinite(weights_N) | (weights_N < 0))
    if bad.size:
        raise InputError(f"{name}: weight {bad[0]} is {weights_N[bad[0]]}, expected a finite number >= 0")
    largest = weights_N.max()
    if largest == 0:
        raise InputError(f"{name}: all {weights_N.size} weights are zero, expected at least one above zero")
    scaled_N = weights_N / largest
    probabilities_N: Floats = scaled_N / scaled_N.sum()
    return probabilities_N


def _numbers(popularity: Any) -> Any:
    """Refuse what numpy would convert and is no number: text, truth values, the keys of a mapping."""
    import numpy as np

    if isinstance(popularity, np.ndarray):
        if popularity.dtype.kind not in "iufO":
            raise TypeError(f"of {popularity.dtype}")
        return popularity
    if isinstance(popularity, (str, bytes, bytearray, Mapping, Set)):
        raise TypeError("not a sequence")
    values = list(popularity)
    odd = next((value for value in values if isinstance(value, (bool, np.bool_, str, bytes))), None)
    if odd is not None:
        raise TypeError(f"one of them is {odd!r}")
    return values


def named(flag: str, read: Callable[..., Found], given: Any) -> Found:
    """Call a reader of the server's; its ConfigError becomes an InputError that begins with the flag."""
    try:
        return read(given)
    except ConfigError as error:
        raise InputError(f"{flag}: {error}") from None


def text_of(file: Path, where: str, encoding: str = "utf-8") -> str:
    """Read a file; raises InputError that begins with `where`."""
    try:
        return file.read_text(encoding=encoding)
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{where} cannot be read: {error}") from None


def one_of(flag: str, given: str, *known: Word) -> Word:
    """Return the known word that was given; raises InputError for another one."""
    found = next((word for word in known if word == given), None)
    if found is None:
        raise InputError(f"{flag}: got {given!r}, expected {', '.join(known[:-1])} or {known[-1]}")
    return found


def parsed(text: str, where: str, object_pairs_hook: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """Parse a JSON document; raises InputError that begins with `where`."""
    try:
        return json.loads(text, object_pairs_hook=object_pairs_hook)
    except InputError:
        raise
    except ValueError as error:
        raise InputError(f"{where} is not JSON: {error}") from None
    except RecursionError:
        raise InputError(f"{where} is nested too deeply to be read; expected plain lists and objects") from None


def positive(value: Any, name: str, most: float = math.inf) -> float:
    """Return a finite float above zero, at most `most`; raises InputError for another value."""
    span = "above 0" if most == math.inf else f"above 0 and at most {most:,.0f}"
    return _number(value, name, lambda number: 0 < number <= most, f"a number {span}")


def non_negative(value: Any, name: str, most: float = math.inf) -> float:
    """Return a finite float, zero or more, at most `most`; raises InputError for another value."""
    span = ">= 0" if most == math.inf else f"in [0, {most:,.0f}]"
    return _number(value, name, lambda number: 0 <= number <= most, f"a number {span}")


def share(value: Any, name: str) -> float:
    """Return a float in (0, 1]; raises InputError for another value."""
    return _number(value, name, lambda number: 0 < number <= 1, "a share in (0, 1], such as 0.95")


def count(value: Any, name: str, low: int, high: int | None = None) -> int:
    """Return an integer in [low, high]; raises InputError for another value."""
    try:
        number = operator.index(value)
    except TypeError:
        raise InputError(f"{name}: got {value!r}, expected a whole number") from None
    if isinstance(value, bool) or number < low or (high is not None and number > high):
        span = f">= {low}" if high is None else f"in [{low}, {high:,}]"
        raise InputError(f"{name}: got {value}, expected a whole number {span}")
    return number


def _number(value: Any, name: str, fits: Callable[[float], bool], expected: str) -> float:
    if isinstance(value, (str, bytes, bool)):
        raise InputError(f"{name}: got {value!r}, expected a number")
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise InputError(f"{name}: got {value!r}, expected a number") from None
    if not math.isfinite(number):
        raise InputError(f"{name}: got {value}, expected a finite number")
    if not fits(number):
        raise InputError(f"{name}: got {value}, expected {expected}")
    return number
