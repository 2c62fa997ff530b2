"""The files of an adapter's directory, and reads of them that cannot run past their end.

Reads go through the file descriptor and not through a mapping, so a file that is cut short while it
is served gives an error and not a SIGBUS.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lora_server.adapters.config import CONFIG
from lora_server.adapters.header import TensorEntry, header_bytes, read_header
from lora_server.adapters.limits import MAX_FILES, Limits, check_values
from lora_server.adapters.refusal import clip, few, refusal, shown
from lora_server.adapters.scan import is_ignored
from lora_server.errors import AdapterFormatError, ConfigError

WEIGHTS = "adapter_model.safetensors"
INDEX = "adapter_model.safetensors.index.json"
_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
_CHUNK_BYTES = 16 << 20


def find_adapters(directory: str | Path) -> dict[str, Path]:
    """Each sub-directory that holds an adapter's files, valid or not, by its name in sorted order; no hidden or
    temporary ones.

    Raises ConfigError where the directory does not exist, cannot be listed, or is itself an adapter.
    """
    directory = Path(directory)
    try:
        children = sorted(child for child in directory.iterdir() if not is_ignored(child.name))
        found = {child.name: child for child in children if child.is_dir() and is_adapter(child)}
        itself = not found and is_adapter(directory)
    except OSError as error:
        do = "give a directory whose sub-directories are PEFT adapters"
        raise ConfigError(f"adapters: {directory} cannot be listed ({error.strerror}); {do}") from error
    if itself:
        raise ConfigError(
            f"adapters: got {directory}, which is one adapter itself, expected a directory whose sub-directories are "
            f"PEFT adapters; give {directory.resolve().parent}, or start without it and add this one by name"
        )
    return found


def adapter_files(directory: Path, limits: Limits) -> dict[str, int]:
    """What an adapter consists of, by name in bytes; other files may lie beside it. Raises AdapterFormatError,
    OSError."""
    index = [] if (directory / WEIGHTS).exists() else [INDEX]
    names = (CONFIG, *index, *_weight_files(directory, limits))
    return {name: (directory / name).stat().st_size for name in names}


def is_adapter(directory: Path) -> bool:
    """Whether an adapter's files lie in a directory, valid or not."""
    return (directory / CONFIG).exists() or any(directory.glob("adapter_model.*"))


def read_json_file(path: Path, most: int) -> bytes:
    """The bytes of a small file; raises AdapterFormatError where there is none, or one of more than `most` bytes."""
    if not path.is_file():
        raise refusal(path.name, got="no such file", expected="one in the adapter's directory", do="save it with PEFT")
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise too_large(path.name, size, most)
        content = file.read(most)
    check_values(path.name, content, most)
    return content


def too_large(name: str, size: int, most: int) -> AdapterFormatError:
    """The refusal of a text that no adapter of this base model needs."""
    expected = f"at most {most}, which is what adapters of this base model need"
    return refusal(name, got=f"{size} bytes", expected=expected, do="save the adapter with PEFT again")


class OpenFiles:
    """Some files of a directory. Owns their descriptors until `close`."""

    def __init__(self, directory: Path, names: Sequence[str]) -> None:
        """Raises OSError, with nothing left open."""
        self.names = names
        self._descriptors: list[int] = []
        try:
            for name in names:
                self._descriptors.append(os.open(directory / name, os.O_RDONLY | os.O_NONBLOCK))
        except BaseException:
            self.close()
            raise

    def size(self, file: int) -> int:
        """In bytes, now."""
        return os.fstat(self._descriptors[file]).st_size

    def read(self, file: int, begin: int, end: int) -> bytearray:
        """Bytes [begin, end); raises AdapterFormatError where the file has become shorter."""
        buffer, at = bytearray(end - begin), begin
        view = memoryview(buffer)
        while view:
            got = os.preadv(self._descriptors[file], [view], at)
            if got == 0:
                raise refusal(
                    self.names[file], got=f"the end of the file at {at}", expected=f"{end} bytes", do="it was changed"
                )
            view, at = view[got:], at + got
        return buffer

    def stamp(self) -> str:
        """Sizes, times and inodes: equal stamps on one host mean that nobody wrote to the files."""
        stats = [os.fstat(descriptor) for descriptor in self._descriptors]
        return ",".join(f"{one.st_dev}:{one.st_ino}:{one.st_size}:{one.st_mtime_ns}" for one in stats)

    def close(self) -> None:
        """Closes the descriptors; may be called again."""
        while self._descriptors:
            os.close(self._descriptors.pop())


class WeightFiles:
    """The safetensors files of one adapter, `opened`, and what their headers say."""

    def __init__(self, directory: Path, limits: Limits) -> None:
        """Opens and checks; raises AdapterFormatError, with nothing left open, or OSError."""
        self._limits, self._header_bytes = limits, 0
        self.entries: dict[str, TensorEntry] = {}
        names = _weight_files(directory, limits)
        for name in names:
            if not (directory / name).is_file():
                raise refusal(name, got="no such file", expected="the adapter's weights", do="copy it again")
        self.opened = OpenFiles(directory, names)
        try:
            for file, name in enumerate(names):
                self._read_header(file, name)
            if (directory / INDEX).exists():
                self._check_index(directory)
        except BaseException:
            self.opened.close()
            raise
        others = [other.name for other in sorted(directory.glob("*.safetensors")) if other.name not in names]
        self.warnings = few(f"{clip(name)} is not one of the adapter's weight files; not used" for name in others)

    def _read_header(self, file: int, name: str) -> None:
        opened, limits = self.opened, self._limits
        length = header_bytes(partial(opened.read, file), opened.size(file), name=name)
        self._header_bytes += length
        if self._header_bytes > limits.header_bytes:
            raise too_large(f"{name}: header", self._header_bytes, limits.header_bytes)
        read, size, most = partial(opened.read, file), opened.size(file), limits.header_bytes
        for entry in read_header(read, size, most, name=name, file=file):
            if len(self.entries) == limits.tensors:
                expected = f"at most {limits.tensors}, which is what adapters of this base model have"
                raise refusal(name, got="more tensors", expected=expected, do="is it of another base model?")
            if entry.name in self.entries:
                raise refusal(entry.name, got="the tensor in two files", expected="one", do="save it again")
            self.entries[entry.name] = entry

    def _check_index(self, directory: Path) -> None:
        listed = {key: self.opened.names.index(name) for key, name in _weight_map(directory, self._limits).items()}
        for key in sorted(listed.keys() | self.entries.keys()):
            entry = self.entries.get(key)
            if entry is None or listed.get(key) != entry.file:
                got = "a tensor that is not where the index says"
                raise refusal(key, got=got, expected=f"{INDEX} and the files to agree", do="save it again")

    def chunks(self) -> Iterator[tuple[TensorEntry | None, bytearray]]:
        """All bytes of all files in order; with each piece the tensor it belongs to, None for a header."""
        ordered = sorted(self.entries.values(), key=lambda entry: (entry.file, entry.begin))
        for file in range(len(self.opened.names)):
            mine = [entry for entry in ordered if entry.file == file]
            yield None, self.opened.read(file, 0, mine[0].begin)
            for entry in mine:
                for begin in range(entry.begin, entry.end, _CHUNK_BYTES):
                    yield entry, self.opened.read(file, begin, min(begin + _CHUNK_BYTES, entry.end))


def _weight_files(directory: Path, limits: Limits) -> list[str]:
    single, index = (directory / WEIGHTS).exists(), (directory / INDEX).exists()
    if single and index:
        raise refusal(INDEX, got=f"both it and {WEIGHTS}", expected="one of them", do="remove the one that is stale")
    if single:
        return [WEIGHTS]
    if index:
        return sorted(set(_weight_map(directory, limits).values()))
    raise no_weights(sorted(file.name for file in directory.iterdir() if file.suffix in _PICKLES))


def no_weights(pickles: Sequence[str]) -> AdapterFormatError:
    """The refusal of a directory that has no weights, or has them in such files alone."""
    if pickles:
        do = "load it with PEFT where you trust it and save it again with safe_serialization=True"
        return refusal(pickles[0], got="a pickle file, which can run code", expected=WEIGHTS, do=do)
    return refusal(
        WEIGHTS, got="no such file", expected="the adapter's weights in its directory", do="save it with PEFT"
    )


def _weight_map(directory: Path, limits: Limits) -> dict[str, str]:
    return weight_map(read_json_file(directory / INDEX, limits.index_bytes))


def weight_map(content: bytes) -> dict[str, str]:
    """By tensor the file that has it, out of an index; raises AdapterFormatError."""
    try:
        index: Any = json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise refusal(INDEX, got=f"a file that is not JSON ({error})", expected="JSON", do="save it again") from None
    names = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(names, dict) or not names:
        raise refusal(f"{INDEX}: weight_map", got=shown(names), expected="an object of tensor: file")
    for key, name in names.items():
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            wanted = "a .safetensors file name without a directory"
            raise refusal(f"{INDEX}: {shown(key)}", got=shown(name), expected=wanted)
    if (count := len(set(names.values()))) > MAX_FILES:
        raise refusal(INDEX, got=f"{count} files", expected=f"at most {MAX_FILES}", do="save it in fewer")
    return names
