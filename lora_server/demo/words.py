"""Prompts and answers as text, where a model's directory has a tokenizer; else as token ids."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from lora_server.demo.styles import END

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")


class Words:
    """The tokenizer of a model's directory, or none."""

    def __init__(self, model: Path) -> None:
        self._tokenizer: PreTrainedTokenizerBase | None = None
        if any((model / name).exists() for name in FILES):
            from transformers import AutoTokenizer

            self._tokenizer = cast("PreTrainedTokenizerBase", AutoTokenizer.from_pretrained(model))

    def encode(self, text: str, otherwise: Sequence[int]) -> list[int]:
        """Return the token ids of `text`; without a tokenizer those of `otherwise`."""
        return list(otherwise) if self._tokenizer is None else list(self._tokenizer(text)["input_ids"])

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text up to where the demo's own models end an answer; without a tokenizer the numbers."""
        if self._tokenizer is None:
            return " ".join(map(str, tokens))
        return str(self._tokenizer.decode(tokens)).partition(END)[0].strip()
