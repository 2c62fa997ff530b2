"""A base model's directory: its safetensors files and where each tensor lies in them."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from lora_server.errors import ConfigError
from lora_server.merged import MERGED
from lora_server.spec import ModelSpec, load

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}  # dtypes that deltas can be added to
_NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".msgpack", ".h5")
_MAX_HEADER = 100 << 20


class BaseTensor(NamedTuple):
    """A tensor of a checkpoint; `begin` and `end` are offsets from the start of its file."""

    name: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


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
        self.tensors = [tensor for name in self.weight_files for tensor in _header(directory / name)]

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


def _header(path: Path) -> list[BaseTensor]:
    """Read a file's header. Raises ConfigError for one that does not describe the file to its last byte."""
    size = path.stat().st_size
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8)) if size >= 8 else (size,)
        if length > min(size - 8, _MAX_HEADER):
            raise _damaged(path, f"{size} bytes", "a safetensors header and its tensors")
        try:
            fields: dict[str, Any] = json.loads(file.read(length))
            fields.pop("__metadata__", None)
            tensors = [
                BaseTensor(name, path.name, one["dtype"], tuple(one["shape"]), *(8 + length + at for at in offsets))
                for name, one in fields.items()
                if len(offsets := one["data_offsets"]) == 2
            ]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise _damaged(path, f"a header that cannot be read ({error})", "a safetensors header") from None
    end = max((tensor.end for tensor in tensors), default=8 + length)
    if end != size:
        raise _damaged(path, f"{size} bytes", f"{end} by its header")
    return tensors


def _damaged(path: Path, got: str, expected: str) -> ConfigError:
    return ConfigError(f"{path}: got {got}, expected {expected}; the file is truncated or damaged, copy it again")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: got a {type(content).__name__}, expected a JSON object")
    return content
