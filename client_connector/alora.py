"""Where an activated LoRA (aLoRA) begins to act: rows before it are the base model's and never leave the engine."""

from __future__ import annotations

from collections.abc import Sequence


def invocation_start(prompt: Sequence[int], invocation: Sequence[int]) -> int | None:
    """Position of the first token of the last occurrence of `invocation` in `prompt`; None where there is none.

    As PEFT decides it: what is generated afterwards never counts, and without an occurrence the
    adapter does not act at all.
    """
    length = len(invocation)
    wanted = list(invocation)
    for start in range(len(prompt) - length, -1, -1):
        if prompt[start] == wanted[0] and list(prompt[start : start + length]) == wanted:
            return start
    return None
