"""Which adapters lie in a directory, and whether their files were touched: by stat alone, no file is opened.

Two scans with equal stamps mean that nobody wrote to an adapter between them, added to it, or put another in its place.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from pathlib import Path
from typing import NamedTuple

from lora_server.adapters.config import CONFIG

WEIGHTS_PREFIX = "adapter_model."
TEMPORARY = (".tmp", ".temp", ".part", ".partial", ".filepart", ".swp", "~")
_OWN_FAULT = (errno.EACCES, errno.ENOENT, errno.ELOOP)  # any other error is the file system's


class Scan(NamedTuple):
    """Stamps by the sub-directory's name. `others` have no adapter's files; `identity` is the directory's own."""

    identity: tuple[int, int]
    adapters: dict[str, str]
    others: dict[str, str]


def is_ignored(name: str) -> bool:
    """Whether a sub-directory of this name is hidden, or somebody's unfinished copy."""
    return name.startswith(".") or name.endswith(TEMPORARY) or name == "lost+found"


def is_adapter_file(name: str) -> bool:
    """Whether a directory with such a file is an adapter's, valid or not."""
    return name == CONFIG or name.startswith(WEIGHTS_PREFIX)


def scan(directory: Path) -> Scan:
    """Raises OSError where the directory cannot be listed, or its file system fails.

    A link that leads nowhere, and a sub-directory that may not be read, is one of `adapters`: it was meant to be one.
    """
    status = directory.stat()
    found = Scan((status.st_dev, status.st_ino), {}, {})
    with os.scandir(directory) as entries:
        children = [one for one in entries if not is_ignored(one.name) and (one.is_symlink() or one.is_dir())]
    for child in children:
        stamp, has_files = _look(child.path)
        if stamp:
            (found.adapters if has_files else found.others)[child.name] = stamp
    return found


def stamp_of(directory: Path) -> str:
    """As in a scan; empty where there is nothing. Raises OSError where the file system fails."""
    return _look(str(directory))[0]


def _look(path: str) -> tuple[str, bool]:
    """The stamp of one sub-directory, and whether it has an adapter's files."""
    try:
        status = os.stat(path)  # noqa: PTH116  (a Path per sub-directory would be half of a scan)
        if not stat.S_ISDIR(status.st_mode):
            return "", False
        with os.scandir(path) as entries:
            files = {one.name: _file_stamp(one) for one in entries if is_watched(one.name)}
    except OSError as error:
        if error.errno not in _OWN_FAULT:
            raise
        return (f"unreadable: {error.strerror}", True) if os.path.lexists(path) else ("", False)
    text = repr((status.st_ino, sorted(files.items())))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest(), any(map(is_adapter_file, files))


def is_watched(name: str) -> bool:
    """An adapter's file, or what a copying program calls it until it is whole; not logs, not checkpoints."""
    return "adapter_" in name or ".safetensors" in name


def _file_stamp(entry: os.DirEntry[str]) -> tuple[int, ...]:
    """Not the device's number: a volume that is mounted again may get another. The mode: for who mends that alone."""
    try:
        status = entry.stat()
    except OSError as error:
        if error.errno not in _OWN_FAULT:
            raise
        return ()
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_mode, status.st_uid, status.st_gid
