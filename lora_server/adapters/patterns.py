"""rank_pattern and alpha_pattern: a value per module name, with PEFT's way of matching.

PEFT takes the first pattern, in the order of the file, for which re.match(r"(.*\\.)?(PATTERN)$", name)
holds. An adapter may name each of tens of thousands of experts, so patterns that are plain names
are looked up and only the others are tried one after another; the first in order still wins.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import Protocol

from lora_server.adapters.refusal import refusal, shown

# Between these words a name has nothing but dots, so there "." as a dot and "." as a regex agree.
_WORDS = "model|layers|self_attn|mlp|block_sparse_moe|experts|[0-9]+|w[123]|(?:q|k|v|o|gate|up|down|gate_up)_proj"
_PLAIN = re.compile(rf"(?!.*[0-9]\.[0-9])(?:{_WORDS})(?:\.(?:{_WORDS}))*")
_MAX_CHARS, _MAX_REGEXES, _MAX_SECONDS = 1000, 256, 10.0
_DIFFERENT = ("{,", "[:")  # what Python's re and RE2 both take, and read differently


class Patterns:
    """An ordered map from patterns to numbers."""

    def __init__(self, field: str, values: Mapping[str, float]) -> None:
        """Raises AdapterFormatError for a pattern that is not a (safe) regular expression."""
        self._field, self.values = field, values
        self._seconds = 0.0
        self._plain: dict[str, tuple[int, float]] = {}
        self._regex: list[tuple[int, Regex, float]] = []
        for order, (pattern, value) in enumerate(values.items()):
            name = pattern.replace("\\.", ".")
            if _PLAIN.fullmatch(name):
                self._plain.setdefault(name, (order, value))
            elif len(self._regex) == _MAX_REGEXES:
                do = "name the modules in full, without wildcards"
                raise refusal(field, got="more regular expressions", expected=f"at most {_MAX_REGEXES}", do=do)
            else:
                self._regex.append((order, compiled(field, pattern, rf"(.*\.)?({pattern})$"), value))

    def first(self, module: str) -> float | None:
        """Return the value of the first pattern that matches a module's name, or None."""
        if not self.values:
            return None
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
    """Return the names by which PEFT knows a module: the rest of its name after each dot."""
    parts = module.split(".")
    return [".".join(parts[begin:]) for begin in range(len(parts))]


class Regex(Protocol):
    """A compiled pattern. Matching takes time linear in the text's length."""

    def match(self, text: str, /) -> object | None:
        """Return a match if the pattern matches the beginning of a text, else None."""
        ...

    def fullmatch(self, text: str, /) -> object | None:
        """Return a match if the pattern matches a whole text, else None."""
        ...


def compiled(field: str, pattern: str, whole: str) -> Regex:
    """Compile `whole`, which embeds the untrusted `pattern`; AdapterFormatError where that is no pattern of RE2's.

    Python's own, by which PEFT matches, may take for ever; where both take a pattern they find the same.
    """
    import re2

    if len(pattern) > _MAX_CHARS:
        expected = f"at most {_MAX_CHARS} characters"
        raise refusal(field, got=f"pattern {shown(pattern)}", expected=expected, do="write a simpler pattern")
    try:
        re.compile(whole)
        if any(mark in pattern for mark in _DIFFERENT):
            raise re.error(f"with {' or '.join(_DIFFERENT)}")
        options = re2.Options()
        options.log_errors, options.never_capture = False, True
        found: Regex = re2.compile(whole, options)
        return found
    except (re.error, re2.error, OverflowError, RecursionError) as error:
        reason = error.args[0].decode() if error.args and isinstance(error.args[0], bytes) else error
        got, do = f"pattern {shown(pattern)} ({reason})", "write a simpler pattern"
        expected = "a regular expression, without references to groups and without looking ahead or behind"
        raise refusal(field, got=got, expected=expected, do=do) from None
