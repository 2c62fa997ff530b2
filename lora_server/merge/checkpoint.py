"""A base model's directory: its safetensors files and where each tensor lies in them."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lora_server.adapters.header import TensorEntry, header_bytes, read_header
from lora_server.adapters.refusal import refusal
from lora_server.errors import AdapterFormatError, ConfigError
from lora_server.merged import MERGED
from lora_server.spec import ModelSpec, load

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".msgpack", ".h5")
_MAX_HEADER = 100 << 20
_SAMPLES, _SAMPLE_BYTES = 64, 256


class Checkpoint:
    """A base model's directory. Reads headers only; raises ConfigError for one that deltas cannot be added to."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.spec: ModelSpec = load(directory)
        config = _read_json(directory / "config.json")
        if config.get("quantization_config"):
            method = config["quantization_config"].get("quant_method", "of unknown method")
            raise ConfigError(
                f"{directory}: got a quantised base model ({method}), expected float32, bfloat16 or float16 weights; "
                "merge into the model that it was quantised from"
            )
        if (directory / MERGED).exists():
            raise ConfigError(f"{directory}: got a merged model ({MERGED}), expected a base model; name the original")
        self.weight_files = self._weight_files()
        self.tensors = [one for file, name in enumerate(self.weight_files) for one in _header(directory / name, file)]

    def fingerprint(self) -> str:
        """Digest names, shapes and samples of tensors: equal for copies of one base model, however they are split into
        files."""
        tensors, digest = sorted(self.tensors, key=lambda tensor: tensor.name), hashlib.sha256()
        for one in tensors:
            digest.update(f"{one.name} {one.dtype} {one.shape} ".encode())
        for one in tensors[:: max(1, len(tensors) // _SAMPLES)]:
            with (self.directory / self.weight_files[one.file]).open("rb", buffering=0) as file:
                middle = (one.begin + one.end) // 2
                digest.update(os.pread(file.fileno(), min(_SAMPLE_BYTES, one.end - middle), middle))
        return digest.hexdigest()[:16]

    def _weight_files(self) -> list[str]:
        if (self.directory / INDEX).is_file():
            names = sorted(set(_read_json(self.directory / INDEX).get("weight_map", {}).values()))
        else:
            names = [SINGLE]
        missing = [name for name in names if Path(name).name != name or not (self.directory / name).is_file()]
        if missing or not names:
            raise ConfigError(
                f"{self.directory}: got no {missing[0] if missing else 'weights'}, expected the base model's "
                "safetensors files; download it whole, or save it with safe_serialization"
            )
        return names

    def other_files(self) -> Iterator[Path]:
        """List the files beside the weights that an engine loads: configuration, tokenizer, index."""
        for path in sorted(self.directory.iterdir()):
            if path.is_file() and not path.name.startswith(".") and path.suffix not in _NOT_COPIED:
                yield path


def base_weights(directory: str | Path) -> str:
    """Return the fingerprint of a base model's weights; empty where there are none that deltas can be added to."""
    try:
        return Checkpoint(Path(directory)).fingerprint()
    except (ConfigError, OSError):
        return ""


def _header(path: Path, file: int) -> list[TensorEntry]:
    """Read a file's header. Raises ConfigError for one that does not describe the file to its last byte."""
    with path.open("rb", buffering=0) as opened:

        def read(begin: int, end: int) -> bytes:
            return os.pread(opened.fileno(), end - begin, begin)

        size = path.stat().st_size
        try:
            if (length := header_bytes(read, size, name=path.name)) > _MAX_HEADER:
                raise refusal(path.name, got=f"a header of {length} bytes", expected=f"at most {_MAX_HEADER}")
            return read_header(read, size, _MAX_HEADER, name=path.name, file=file, any_dtype=True)
        except AdapterFormatError as error:
            raise ConfigError(f"{path}: {error}; the file is truncated or damaged, copy it again") from None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: got a {type(content).__name__}, expected a JSON object")
    return content
