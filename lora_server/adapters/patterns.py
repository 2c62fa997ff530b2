"""rank_pattern and alpha_pattern: a value per module name, with PEFT's way of matching.

PEFT takes the first pattern, in the order of the file, for which re.match(r"(.*\\.)?(PATTERN)$", name)
holds. An adapter may name each of tens of thousands of experts, so patterns that are plain names
are looked up and only the others are tried one after another; the first in order still wins.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping

from lora_server.adapters.refusal import refusal, shown

# Between these words a name has nothing but dots, so there "." as a dot and "." as a regex agree.
_WORDS = "model|layers|self_attn|mlp|block_sparse_moe|experts|[0-9]+|w[123]|(?:q|k|v|o|gate|up|down|gate_up)_proj"
_PLAIN = re.compile(rf"(?!.*[0-9]\.[0-9])(?:{_WORDS})(?:\.(?:{_WORDS}))*")
# A pattern comes from outside, and matching must end: no repeated groups, few repetitions.
_REPEATED_GROUP = re.compile(r"\)[*+{]")
_UNBOUNDED, _OPTIONAL = re.compile(r"[*+{]"), re.compile(r"(?<!\()\?")
_MAX_UNBOUNDED, _MAX_OPTIONAL, _MAX_CHARS = 4, 8, 1000
_MAX_SECONDS = 60.0


class Patterns:
    """An ordered map from patterns to numbers."""

    def __init__(self, field: str, values: Mapping[str, float]) -> None:
        """Raises AdapterFormatError for a pattern that is not a (safe) regular expression."""
        self._field = field
        self._seconds = 0.0
        self._plain: dict[str, tuple[int, float]] = {}
        self._regex: list[tuple[int, re.Pattern[str], float]] = []
        for order, (pattern, value) in enumerate(values.items()):
            name = pattern.replace("\\.", ".")
            if _PLAIN.fullmatch(name):
                self._plain.setdefault(name, (order, value))
            else:
                self._regex.append((order, compiled(field, pattern, rf"(.*\.)?({pattern})$"), value))

    def first(self, module: str) -> float | None:
        """The value of the first pattern that matches a module's name, None where none does."""
        found = min((hit for hit in map(self._plain.get, suffixes(module)) if hit), default=None)
        begin = time.monotonic()
        for order, regex, value in self._regex:
            if found is not None and found[0] < order:
                break
            if regex.match(module):
                found = (order, value)
                break
        self._seconds += time.monotonic() - begin
        if self._seconds > _MAX_SECONDS:
            got = f"{len(self._regex)} regular expressions that take over {_MAX_SECONDS:.0f} s to match"
            raise refusal(self._field, got=got, expected="less", do="name the modules in full, without wildcards")
        return None if found is None else found[1]


def suffixes(module: str) -> list[str]:
    """The names by which PEFT knows a module: from each of its dots on."""
    parts = module.split(".")
    return [".".join(parts[begin:]) for begin in range(len(parts))]


def compiled(field: str, pattern: str, whole: str) -> re.Pattern[str]:
    """`whole`, which embeds the untrusted `pattern`; AdapterFormatError where that is invalid or could run away."""
    unbounded, optional = len(_UNBOUNDED.findall(pattern)), len(_OPTIONAL.findall(pattern))
    limits_kept = len(pattern) <= _MAX_CHARS and unbounded <= _MAX_UNBOUNDED and optional <= _MAX_OPTIONAL
    if not limits_kept or _REPEATED_GROUP.search(pattern):
        expected = f"at most {_MAX_CHARS} characters, {_MAX_UNBOUNDED} repetitions and no repeated group"
        raise refusal(field, got=f"pattern {shown(pattern)}", expected=expected, do="write a simpler pattern")
    try:
        return re.compile(whole)
    except (re.error, OverflowError, RecursionError) as error:
        got = f"pattern {shown(pattern)} ({error})"
        raise refusal(field, got=got, expected="a regular expression", do="correct the pattern") from None
