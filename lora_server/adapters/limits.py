"""Limits of the text of an adapter for one base model. More is refused unread, because parsing blocks the process.

The largest texts name each expert's matrices one by one.
"""

from __future__ import annotations

from typing import NamedTuple

from lora_server.adapters.refusal import refusal
from lora_server.spec import ModelSpec

CONFIG_BYTES, CONFIG_BYTES_PER_MODULE = 256 << 10, 384  # target_modules, rank_pattern and alpha_pattern may list it
HEADER_BYTES, HEADER_BYTES_PER_TENSOR = 256 << 10, 256
INDEX_BYTES_PER_TENSOR = 256
BYTES_PER_VALUE = 16  # of a text of the greatest length; adapters' texts have half as many values
MAX_FILES = 256


class AdapterLimits(NamedTuple):
    """Most bytes of adapter_config.json, of an index, of the headers of all weight files; most tensors."""

    config_bytes: int
    index_bytes: int
    header_bytes: int
    tensors: int

    @classmethod
    def of(cls, spec: ModelSpec) -> AdapterLimits:
        """Return the limits for adapters of this base model."""
        modules = sum(spec.experts_at(site) * len(spec.sections(site)) for site in spec.sites())
        tensors = 2 * modules
        return cls(
            CONFIG_BYTES + CONFIG_BYTES_PER_MODULE * modules,
            HEADER_BYTES + INDEX_BYTES_PER_TENSOR * tensors,
            HEADER_BYTES + HEADER_BYTES_PER_TENSOR * tensors,
            tensors,
        )


def check_values(name: str, text: bytes | bytearray, most_bytes: int) -> None:
    """Raise AdapterFormatError for more JSON values than a text of at most `most_bytes` needs.

    No other thread runs while Python parses one: 10 MB of `[],` took 0.8 s.
    """
    found, most = sum(map(text.count, (b",", b"[", b"{"))), most_bytes // BYTES_PER_VALUE
    if found > most:
        expected = f"at most {most}, which is what adapters of this base model need"
        raise refusal(name, got=f"{found} values", expected=expected, do="save the adapter with PEFT again")
