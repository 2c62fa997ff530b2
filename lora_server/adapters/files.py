"""Files of an adapter's directory, and reads that cannot run past their end.

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
from lora_server.adapters.limits import MAX_FILES, AdapterLimits, check_values
from lora_server.adapters.refusal import clip, few, refusal, shown
from lora_server.adapters.scan import escaped, is_ignored, is_text
from lora_server.errors import AdapterFormatError, ConfigError

WEIGHTS = "adapter_model.safetensors"
INDEX = "adapter_model.safetensors.index.json"
_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
_CHUNK_BYTES = 16 << 20


def find_adapters(directory: str | Path) -> dict[str, Path]:
    """Find each sub-directory that holds an adapter's files, valid or not, by its name in sorted order; no hidden or
    temporary ones.

    Raises ConfigError where the directory does not exist, cannot be listed, or is itself an adapter.
    """
    directory = Path(directory)
    if not is_text(str(directory.absolute())):
        raise ConfigError(
            f"adapters: got {escaped(str(directory.absolute()))}, expected a path of UTF-8; rename the directory"
        )
    try:
        children = sorted(child for child in directory.iterdir() if not is_ignored(child.name))
        found = {child.name: child for child in children if child.is_dir() and is_adapter(child)}
        itself = not found and is_adapter(directory)
    except OSError as error:
        do = "give a directory of PEFT adapters, one per sub-directory"
        raise ConfigError(f"adapters: {directory} cannot be listed ({error.strerror}); {do}") from error
    if itself:
        raise ConfigError(
            f"adapters: got {directory}, which is one adapter itself, expected a directory of PEFT adapters, one per "
            f"sub-directory; give {directory.resolve().parent}, or start without it and add this one by name"
        )
    return found


def adapter_files(directory: Path, limits: AdapterLimits) -> dict[str, int]:
    """Return the sizes of an adapter's files by name; ignores other files. Raises AdapterFormatError, OSError."""
    index = [] if (directory / WEIGHTS).exists() else [INDEX]
    names = (CONFIG, *index, *_weight_files(directory, limits))
    return {name: (directory / name).stat().st_size for name in names}


def is_adapter(directory: Path) -> bool:
    """Return whether a directory holds an adapter's files, valid or not."""
    return (directory / CONFIG).exists() or any(directory.glob("adapter_model.*"))


def read_json_file(path: Path, most: int) -> bytes:
    """Read a small file; raises AdapterFormatError where there is none, or one of more than `most` bytes."""
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
    """Return the refusal of a text that is larger than an adapter of this base model needs."""
    expected = f"at most {most}, which is what adapters of this base model need"
    return refusal(name, got=f"{size} bytes", expected=expected, do="save the adapter with PEFT again")


class OpenFiles:
    """Open files of a directory. Owns their descriptors until `close`."""

    def __init__(self, directory: Path, names: Sequence[str]) -> None:
        """Open the files; raises OSError with none left open."""
        self.names = names
        self._descriptors: list[int] = []
        try:
            for name in names:
                self._descriptors.append(os.open(directory / name, os.O_RDONLY | os.O_NONBLOCK))
        except BaseException:
            self.close()
            raise
        self._opened = self._stats()

    @property
    def stamp(self) -> str:
        """Return sizes, times and inodes at opening: equal stamps on one host mean that the files were not written to.

        `cp -p` and `tar` set the mtime, and an inode is reused; the ctime tells such content apart.
        """
        found = self._opened
        return ",".join(f"{one.st_dev}:{one.st_ino}:{one.st_size}:{one.st_mtime_ns}:{one.st_ctime_ns}" for one in found)

    def check(self) -> None:
        """Raise AdapterFormatError where a file was written to since it was opened: reads may mix two contents.

        To unlink a file changes its ctime and nothing that is read.
        """
        for name, before, now in zip(self.names, self._opened, self._stats(), strict=True):
            moved = now.st_ctime_ns != before.st_ctime_ns and now.st_nlink == before.st_nlink
            if moved or (now.st_size, now.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
                got, do = "a file that was changed while it was read", "put the adapter back, or add it again"
                raise refusal(name, got=got, expected="the same bytes", do=do)

    def _stats(self) -> list[os.stat_result]:
        return [os.fstat(descriptor) for descriptor in self._descriptors]

    def size(self, file: int) -> int:
        """Return the size of a file now, in bytes."""
        return os.fstat(self._descriptors[file]).st_size

    def read(self, file: int, begin: int, end: int) -> bytearray:
        """Read bytes [begin, end); raises AdapterFormatError where the file has become shorter."""
        buffer = bytearray(end - begin)
        self.read_into(file, begin, memoryview(buffer))
        return buffer

    def read_into(self, file: int, begin: int, buffer: memoryview) -> None:
        """Fill a buffer of bytes from `begin` on; raises AdapterFormatError where the file has become shorter."""
        at, end = begin, begin + len(buffer)
        while buffer:
            got = os.preadv(self._descriptors[file], [buffer], at)
            if got == 0:
                raise refusal(
                    self.names[file], got=f"the end of the file at {at}", expected=f"{end} bytes", do="it was changed"
                )
            buffer, at = buffer[got:], at + got

    def close(self) -> None:
        """Close the descriptors. Idempotent."""
        while self._descriptors:
            os.close(self._descriptors.pop())


class WeightFiles:
    """Safetensors files of one adapter, `opened`, and the entries of their headers."""

    def __init__(self, directory: Path, limits: AdapterLimits) -> None:
        """Open and check the files; raises AdapterFormatError or OSError, with none left open."""
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
        """Yield the bytes of all files in order, each piece with the tensor it belongs to (None for a header)."""
        ordered = sorted(self.entries.values(), key=lambda entry: (entry.file, entry.begin))
        for file in range(len(self.opened.names)):
            mine = [entry for entry in ordered if entry.file == file]
            yield None, self.opened.read(file, 0, mine[0].begin)
            for entry in mine:
                for begin in range(entry.begin, entry.end, _CHUNK_BYTES):
                    yield entry, self.opened.read(file, begin, min(begin + _CHUNK_BYTES, entry.end))


def _weight_files(directory: Path, limits: AdapterLimits) -> list[str]:
    single, index = (directory / WEIGHTS).exists(), (directory / INDEX).exists()
    if single and index:
        raise refusal(INDEX, got=f"both it and {WEIGHTS}", expected="one of them", do="remove the one that is stale")
    if single:
        return [WEIGHTS]
    if index:
        return sorted(set(_weight_map(directory, limits).values()))
    raise no_weights(sorted(file.name for file in directory.iterdir() if file.suffix in _PICKLES))


def no_weights(pickles: Sequence[str]) -> AdapterFormatError:
    """Return the refusal of a directory without weights, or with weights in `pickles` alone."""
    if pickles:
        do = "load it with PEFT where you trust it and save it again with safe_serialization=True"
        return refusal(pickles[0], got="a pickle file, which can run code", expected=WEIGHTS, do=do)
    return refusal(
        WEIGHTS, got="no such file", expected="the adapter's weights in its directory", do="save it with PEFT"
    )


def _weight_map(directory: Path, limits: AdapterLimits) -> dict[str, str]:
    return weight_map(read_json_file(directory / INDEX, limits.index_bytes))


def weight_map(content: bytes) -> dict[str, str]:
    """Parse an index into the file of each tensor; raises AdapterFormatError."""
    try:
        index: Any = json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise refusal(INDEX, got=f"a file that is not JSON ({error})", expected="JSON", do="save it again") from None
    names = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(names, dict) or not names:
        raise refusal(f"{INDEX}: weight_map", got=shown(names), expected="an object of tensor: file")
    for key, name in names.items():
        if (
            not isinstance(name, str)
            or Path(name).name != name
            or not name.endswith(".safetensors")
            or not is_text(name)
        ):
            wanted = "a .safetensors file name of UTF-8, without a directory"
            raise refusal(f"{INDEX}: {shown(key)}", got=shown(name), expected=wanted)
    if (count := len(set(names.values()))) > MAX_FILES:
        raise refusal(INDEX, got=f"{count} files", expected=f"at most {MAX_FILES}", do="save it in fewer")
    return names
