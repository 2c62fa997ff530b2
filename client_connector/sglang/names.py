"""Names of the base model, and the id by which SGLang knows an adapter."""

from __future__ import annotations

from typing import NamedTuple

from client_connector.serving.settings import KEY

UNNAMED = ("", "default", None)  # the model of a request that names none


def base_names(served_model_name: str, model_path: str) -> tuple[str, ...]:
    """Return the names that mean the base model; no adapter may have one of them."""
    return (served_model_name, model_path, *(name for name in UNNAMED if name))


class AdapterId(NamedTuple):
    """An adapter as a request has it: part of the key of its KV cache, so that versions share nothing.

    `salt`: a secret of the engine's, so that no caller can write such a key.

    `start`: where an activated LoRA begins to act. It is part of the key: the same tokens have the base model's KV
    before this position, and the adapter's after it.
    """

    salt: str
    name: str
    version: str
    start: int = 0

    def __str__(self) -> str:
        return f"{KEY}:{self.salt}:{self.version}:{self.start}:{self.name}"

    @classmethod
    def parse(cls, text: str) -> AdapterId:
        """Read what `str` wrote."""
        _, salt, version, start, name = text.split(":", 4)
        return cls(salt, name, version, int(start))
