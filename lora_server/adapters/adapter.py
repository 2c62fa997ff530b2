"""Open an adapter for the first time, or after its files were touched: everything is checked."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from lora_server.adapters.config import CONFIG, parse_config
from lora_server.adapters.files import WeightFiles, read_json_file
from lora_server.adapters.header import TensorEntry
from lora_server.adapters.keys import Form
from lora_server.adapters.limits import AdapterLimits
from lora_server.adapters.outline import Outline
from lora_server.adapters.parts import collect
from lora_server.adapters.refusal import refusal, shown
from lora_server.adapters.scan import stamp_of
from lora_server.adapters.settings import LoraSettings
from lora_server.adapters.weights import Weights
from lora_server.errors import AdapterFormatError
from lora_server.spec import ModelSpec

# bits of the exponent, all of them set in NaN and Inf
_EXPONENTS: dict[str, np.unsignedinteger[Any]] = {
    "F32": np.uint32(0x7F80_0000),
    "F16": np.uint16(0x7C00),
    "BF16": np.uint16(0x7F80),
}


class Adapter(Weights):
    """An open, structurally valid adapter. A later `reopen` needs its `outline`, `seen` and `stamp`."""

    def __init__(self, path: Path, spec: ModelSpec, settings: LoraSettings, files: WeightFiles, seen: str) -> None:
        """Takes over `files`; use `open_adapter`."""
        self.seen = seen
        self.base_model = settings.base_model
        self.invocation = settings.invocation
        self._weight_files = files
        self._meaning = settings.digest()
        # equal stamps on one host mean that the files were not touched, and that they mean the same
        stamp = f"{self._meaning.hex()[:16]}/{files.opened.stamp}"
        collected = collect(files.entries, spec, settings)
        super().__init__(path, spec, Outline(files.opened.names, collected, spec), files.opened, stamp)
        parts = [(site, stored) for site, experts in collected.items() for of in experts.values() for stored in of]
        self.lora_rank: int = max(stored.part.lora_rank for _, stored in parts)
        self.nbytes: int = sum(stored.num_bytes(spec.in_width(site)) for site, stored in parts)
        modules = (stored.target.module for _, stored in parts if stored.target.form is Form.MATRIX)
        self.warnings: tuple[str, ...] = (
            *settings.warnings,
            *settings.selection.warnings(modules),
            *files.warnings,
            *_base_warning(settings, spec),
        )

    def version(self) -> str:
        """Return a hex digest of weights and meaning, read in chunks; raises AdapterFormatError for NaN or Inf."""
        digest = hashlib.sha256(self._meaning)
        try:
            for entry, piece in self._weight_files.chunks():
                digest.update(piece)
                if entry is not None and not _is_finite(piece, entry):
                    raise refusal(entry.name, got="NaN or Inf", expected="finite numbers", do="retrain or save again")
        except AdapterFormatError as error:
            raise AdapterFormatError(f"adapter {self.path}: {error}") from None
        return digest.hexdigest()


def open_adapter(path: str | Path, spec: ModelSpec) -> Adapter:
    """Open the adapter in a directory and check all but its numbers: config, names, shapes, pairs.

    Reads the config and the safetensors headers only. Raises AdapterFormatError, naming the key,
    what was got and what was expected, for everything that cannot be served exactly.
    """
    directory = Path(path)
    try:
        if not directory.is_dir():
            raise refusal("directory", got="none at this path", expected="a directory saved by PEFT")
        seen = stamp_of(directory)  # first: what is written from now on is seen next time
        limits = AdapterLimits.of(spec)
        settings = parse_config(read_json_file(directory / CONFIG, limits.config_bytes))
        files = WeightFiles(directory, limits)
        try:
            return Adapter(directory, spec, settings, files, seen)
        except BaseException:
            files.opened.close()
            raise
    except AdapterFormatError as error:
        raise AdapterFormatError(f"adapter {directory}: {error}") from None
    except (OSError, ValueError) as error:
        raise AdapterFormatError(f"adapter {directory}: cannot be read: {error}") from error


def validate_adapter(path: str | Path, spec: ModelSpec) -> tuple[Adapter, str]:
    """Open an adapter, check every number, too, and return its version: a hex digest of weights and meaning."""
    adapter = open_adapter(path, spec)
    try:
        return adapter, adapter.version()
    except BaseException:
        adapter.close()
        raise


def _is_finite(data: bytearray, entry: TensorEntry) -> bool:
    exponent = _EXPONENTS[entry.dtype]
    return not bool(((np.frombuffer(data, exponent.dtype) & exponent) == exponent).any())


def _base_warning(settings: LoraSettings, spec: ModelSpec) -> list[str]:
    named = Path(settings.base_model).name
    if not named or named.lower() == spec.name.lower():
        return []
    return [f"base_model_name_or_path is {shown(settings.base_model)}, the server's base model is {spec.name}"]
