"""Expands the names of a batch to its rows."""

from __future__ import annotations

from collections.abc import Sequence

from lora_server.errors import ConfigError


def expand(held: Sequence[object], rows: int, seq_len: int, copies: int) -> int:
    """Count the rows per name of the batch: `copies` sequences (beams) per name, `seq_len` rows each.

    Raises ConfigError if the model's batch is not one sequence per name.
    """
    if rows != len(held) * copies:
        raise ConfigError(
            f"lora.adapters(...): got {len(held)} names for a batch of {rows} sequences"
            + (f" ({copies} per name)" if copies > 1 else "")
            + "; give one name per sequence, None for the base model"
        )
    return copies * seq_len
