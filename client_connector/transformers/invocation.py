"""Activated LoRAs in a transformers model: where in each sequence they begin to act."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import structlog
import torch

from client_connector.alora import invocation_start, tokens_of
from lora_server.errors import ConfigError
from lora_server.spec import Invocation
from lora_server.wire.terms import Held

log = structlog.get_logger()


class Invocations:
    """Remembers, between the forward passes of one generation, which sequences were invoked in their prompt."""

    def __init__(self, tokenize: Callable[[str], Sequence[int]]) -> None:
        self._tokenize = tokenize
        self._tokens: dict[Invocation, Sequence[int]] = {}
        self._invoked: list[bool] = []

    def starts(
        self, held_B: Sequence[Held | None], kwargs: dict[str, Any], ids: torch.Tensor | None, seq_len: int
    ) -> list[int]:
        """Return the position of this pass from which each sequence's adapter acts; earlier rows are the base model's.

        What is generated after a prompt never invokes, as in PEFT.
        """
        if not any(held is not None and held.invocation is not None for held in held_B):
            return [0] * len(held_B)
        past = kwargs.get("past_key_values")
        continued = past is not None and past.get_seq_length() > 0 and len(self._invoked) == len(held_B)
        if continued and seq_len == 1:
            starts = [0 if invoked else 1 for invoked in self._invoked]
        else:
            starts = [self._start(held, row, ids, seq_len) for row, held in enumerate(held_B)]
        if continued:  # a prompt in several passes: what was invoked stays so
            starts = [0 if invoked else start for invoked, start in zip(self._invoked, starts, strict=True)]
        self._invoked = [start < seq_len for start in starts]
        return starts

    def _start(self, held: Held | None, row: int, ids: torch.Tensor | None, seq_len: int) -> int:
        if held is None or held.invocation is None:
            return 0
        if ids is None:
            raise ConfigError(f"adapter {held.name!r}: an activated LoRA needs input_ids, got inputs_embeds only")
        start = invocation_start(ids[row].tolist(), self._tokens_of(held))
        if start is None:
            log.warning("adapter not invoked: the base model answers", adapter=held.name, sequence=row)
        return seq_len if start is None else start

    def _tokens_of(self, held: Held) -> Sequence[int]:
        assert held.invocation is not None
        if held.invocation not in self._tokens:
            self._tokens[held.invocation] = tokens_of(held.invocation, self._tokenize)
        return self._tokens[held.invocation]


def tokenizer_of(tokenizer: Any) -> Callable[[str], Sequence[int]]:
    """Wrap the user's tokenizer for legacy invocation strings."""

    def tokenize(text: str) -> Sequence[int]:
        encode = getattr(tokenizer, "encode", None)
        if encode is None:
            raise ConfigError(
                f"invocation string {text!r}: attach(..., tokenizer=...) is needed to find it in the prompt; "
                "or give the adapter alora_invocation_tokens"
            )
        tokens: Sequence[int] = encode(text, add_special_tokens=False)
        return tokens

    return tokenize
