"""Activated LoRAs (aLoRA): the adapter acts on rows from its invocation on; rows before it never leave the engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lora_server.spec import Invocation


def tokens_of(invocation: Invocation, tokenize: Callable[[str], Sequence[int]]) -> Sequence[int]:
    """Return the tokens of an invocation, of which the legacy form is a string; raises what `tokenize` raises."""
    return invocation.tokens or tuple(tokenize(invocation.text))


def invocation_start(prompt: Sequence[int], invocation: Sequence[int]) -> int | None:
    """Find the first token of the last occurrence of `invocation` in `prompt`; None where there is none.

    As in PEFT, tokens that are generated afterwards never count, and without an occurrence the adapter does not act.
    """
    length = len(invocation)
    wanted = list(invocation)
    for start in range(len(prompt) - length, -1, -1) if wanted else ():
        if prompt[start] == wanted[0] and list(prompt[start : start + length]) == wanted:
            return start
    return None
