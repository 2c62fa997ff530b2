"""The record of a merged checkpoint: which adapter version its weights contain. Leaf module: stdlib only.

`lora-server merge` writes it beside the weights, and an engine's connector reads it there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from lora_server.errors import ConfigError

MERGED = "lora_server_merged.json"
FORMAT = 1
_AGAIN = "merge again: lora-server merge"


@dataclass(frozen=True, kw_only=True)
class MergedRecord:
    """The adapter `name` in its `version` (a digest), merged into a base model of this geometry.

    `base_weights`: fingerprint of its weights. `files`: bytes of each weight file. `errors`, `delta_ratio`: see
    merge.rounding.RowErrors.
    """

    name: str
    version: str
    base_model: str
    base_fingerprint: str
    base_weights: str
    dtype: str
    files: Mapping[str, int]
    errors: Mapping[str, Mapping[str, float]]
    delta_ratio: float = 0.0  # 0: not measured
    format: int = FORMAT

    def to_json(self) -> str:
        """Return the file's content."""
        return json.dumps(asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str, where: str) -> MergedRecord:
        """Inverse of `to_json`. Raises ConfigError, which names `where`."""
        try:
            fields = json.loads(text)
            if fields.get("format") != FORMAT:
                raise ConfigError(f"{where}: got format {fields.get('format')!r}, expected {FORMAT}; {_AGAIN}")
            return cls(**fields)
        except (ValueError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"{where}: got a file that cannot be read ({error}), expected a record; {_AGAIN}"
            ) from None


def find_merged(directory: str | Path) -> MergedRecord | None:
    """Read the record beside a model's weights; None for a model that is not merged.

    Raises ConfigError for a record that cannot be read, or that does not fit the weight files beside it.
    """
    path = Path(directory) / MERGED
    try:
        text = path.read_text()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    record = MergedRecord.from_json(text, str(path))
    for name, expected in record.files.items():
        file = path.parent / name
        got = file.stat().st_size if file.is_file() else None
        if got != expected:
            found = "no such file" if got is None else f"{got} bytes"
            raise ConfigError(f"{file}: got {found}, expected {expected} bytes by {MERGED}; copy it again, or {_AGAIN}")
    return record
