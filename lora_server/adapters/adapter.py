"""An opened adapter: its structure in memory, its canonical tensors read from disk on demand."""

from __future__ import annotations

import hashlib
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from lora_server.adapters.config import CONFIG, parse_config
from lora_server.adapters.files import WeightFiles, read_json_file
from lora_server.adapters.header import ITEM_BYTES, TensorEntry
from lora_server.adapters.keys import Form
from lora_server.adapters.parts import Part, StoredPart, collect
from lora_server.adapters.refusal import refusal
from lora_server.adapters.settings import LoraSettings
from lora_server.errors import AdapterFormatError
from lora_server.spec import ModelSpec, Site

if TYPE_CHECKING:
    import torch

_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
# bits of the exponent, all of them set in NaN and Inf
_EXPONENTS: dict[str, np.unsignedinteger[Any]] = {
    "F32": np.uint32(0x7F80_0000),
    "F16": np.uint16(0x7C00),
    "BF16": np.uint16(0x7F80),
}


class Adapter:
    """Opened and structurally validated. Owns open files until `close`; reads may come from any thread.

    Holds no tensors, except the fused B that was read last, so that a loader that goes through the
    experts of a site reorders it once.
    """

    def __init__(self, path: Path, spec: ModelSpec, settings: LoraSettings, files: WeightFiles) -> None:
        """Takes over `files`; use `open_adapter`."""
        self.path = path
        self.base_model = settings.base_model
        self.invocation = settings.invocation
        self._spec = spec
        self._files = files
        self._meaning = settings.digest()
        # equal stamps on one host mean that nobody touched the files since, and that they mean the same
        self.stamp = f"{self._meaning.hex()[:16]}/{files.stamp()}"
        self._parts = collect(files.entries, spec, settings)
        self._last_fused: tuple[str, torch.Tensor] | None = None
        parts = [(site, stored) for site, experts in self._parts.items() for of in experts.values() for stored in of]
        self.lora_rank: int = max(stored.part.lora_rank for _, stored in parts)
        self.nbytes: int = sum(stored.num_bytes(spec.in_width(site)) for site, stored in parts)
        modules = (stored.target.module for _, stored in parts if stored.target.form is Form.MATRIX)
        self.warnings: tuple[str, ...] = (
            *settings.warnings,
            *settings.selection.warnings(modules),
            *files.warnings,
            *_base_warning(settings, spec),
        )

    def sites(self) -> tuple[Site, ...]:
        """The sites that have any delta, by layer and then in the order of PROJECTIONS."""
        return tuple(self._parts)

    def experts(self, site: Site) -> tuple[int, ...]:
        """The experts of a site that have a delta, sorted; (0,) for a dense site that has one."""
        return tuple(self._parts.get(site, ()))

    def parts(self, site: Site, expert: int) -> tuple[Part, ...]:
        """What `read` would return without the tensors; () where there is no delta."""
        return tuple(stored.part for stored in self._parts.get(site, {}).get(expert, ()))

    def read(self, site: Site, expert: int) -> list[tuple[Part, torch.Tensor, torch.Tensor]]:
        """Per part, by out_begin: A [r, in] and B [out_end - out_begin, r], contiguous copies in the file's dtype.

        Rows of B are in canonical order ([gate | up], [q | k | v]). Raises AdapterFormatError where
        the file has become shorter since it was opened.
        """
        parts = self._parts.get(site, {}).get(expert, ())
        try:
            return [(stored.part, self._read_a(stored, expert), self._read_b(stored, expert)) for stored in parts]
        except AdapterFormatError as error:
            raise AdapterFormatError(f"adapter {self.path}: {error}") from None

    def _read_a(self, stored: StoredPart, expert: int) -> torch.Tensor:
        shape = (stored.part.lora_rank, self._spec.in_width(stored.target.site))
        return self._slice(stored.a, expert if _is_per_expert(stored, stored.a) else 0, shape)

    def _read_b(self, stored: StoredPart, expert: int) -> torch.Tensor:
        shape = (stored.part.out_end - stored.part.out_begin, stored.part.lora_rank)
        if stored.target.form is Form.FLAT:
            b = self._fused_b(stored)[expert]
        else:
            b = self._slice(stored.b, expert if _is_per_expert(stored, stored.b) else 0, shape)
        if self._spec.interleaved_gate_up and stored.target.section == "gate_up":
            b = b.view(-1, 2, shape[1]).transpose(0, 1).reshape(shape)
        return b.clone() if stored.target.form is Form.FLAT else b

    def _slice(self, entry: TensorEntry, index: int, shape: tuple[int, int]) -> torch.Tensor:
        """Matrix `index` of consecutive matrices of one shape."""
        num_bytes = shape[0] * shape[1] * ITEM_BYTES[entry.dtype]
        return _tensor(self._files.read(entry, index * num_bytes, (index + 1) * num_bytes), entry).view(shape)

    def _fused_b(self, stored: StoredPart) -> torch.Tensor:
        """B [E, out, r] of a fused tensor, whose file has column j*E+e for column j of expert e."""
        last = self._last_fused
        if last is None or last[0] != stored.b.name:
            num_experts = self._spec.experts_at(stored.target.site)
            b = _tensor(self._files.read(stored.b), stored.b).view(-1, stored.part.lora_rank, num_experts)
            last = self._last_fused = (stored.b.name, b.permute(2, 0, 1).contiguous())
        return last[1]

    def version(self) -> str:
        """Hex digest of the weights and their meaning, read in chunks; raises AdapterFormatError for NaN or Inf."""
        digest = hashlib.sha256(self._meaning)
        try:
            for entry, piece in self._files.chunks():
                digest.update(piece)
                if entry is not None and not _is_finite(piece, entry):
                    raise refusal(entry.name, got="NaN or Inf", expected="finite numbers", do="retrain or save again")
        except AdapterFormatError as error:
            raise AdapterFormatError(f"adapter {self.path}: {error}") from None
        return digest.hexdigest()

    def close(self) -> None:
        """Closes the files; may be called again. `read` must not be called after it."""
        self._last_fused = None
        self._files.close()

    def __enter__(self) -> Adapter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_adapter(path: str | Path, spec: ModelSpec) -> Adapter:
    """Opens the adapter in a directory and checks all but its numbers: config, names, shapes, pairs.

    Reads the config and the safetensors headers only. Raises AdapterFormatError, naming the key,
    what was got and what was expected, for everything that cannot be served exactly.
    """
    directory = Path(path)
    try:
        if not directory.is_dir():
            raise refusal("directory", got="none at this path", expected="a directory saved by PEFT")
        settings = parse_config(read_json_file(directory / CONFIG))
        files = WeightFiles(directory)
        try:
            return Adapter(directory, spec, settings, files)
        except BaseException:
            files.close()
            raise
    except AdapterFormatError as error:
        raise AdapterFormatError(f"adapter {directory}: {error}") from None
    except (OSError, ValueError) as error:
        raise AdapterFormatError(f"adapter {directory}: cannot be read: {error}") from error


def validate_adapter(path: str | Path, spec: ModelSpec) -> tuple[Adapter, str]:
    """`open_adapter`, plus a look at every number, plus the version: a hex digest of weights and meaning."""
    adapter = open_adapter(path, spec)
    try:
        return adapter, adapter.version()
    except BaseException:
        adapter.close()
        raise


def _is_finite(data: bytearray, entry: TensorEntry) -> bool:
    exponent = _EXPONENTS[entry.dtype]
    return not bool(((np.frombuffer(data, exponent.dtype) & exponent) == exponent).any())


def _tensor(data: bytearray, entry: TensorEntry) -> torch.Tensor:
    """torch is imported here: the controller, which reads no tensors, starts without it."""
    import torch

    return torch.frombuffer(data, dtype=getattr(torch, _DTYPES[entry.dtype]))


def _is_per_expert(stored: StoredPart, entry: TensorEntry) -> bool:
    return stored.target.form is Form.FLAT or (stored.target.form is Form.STACKED and entry.shape[0] > 1)


def _base_warning(settings: LoraSettings, spec: ModelSpec) -> list[str]:
    named = Path(settings.base_model).name
    if not named or named.lower() == spec.name.lower():
        return []
    return [f"base_model_name_or_path is {settings.base_model!r}, the server's base model is {spec.name}"]
