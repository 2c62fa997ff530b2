"""Scan a directory for adapters, and for files that were touched, by stat alone: no file is opened.

Two scans with equal stamps mean that no file of an adapter was written, added or replaced between them.
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
    """Stamps by the sub-directory's name. `others` have no adapter's files; `identity` is the directory's own;
    `unnamed` are skipped, since their names are not UTF-8."""

    identity: tuple[int, int]
    adapters: dict[str, str]
    others: dict[str, str]
    unnamed: frozenset[str] = frozenset()


def is_ignored(name: str) -> bool:
    """Return whether a scan skips a sub-directory: it is hidden or an unfinished copy, or its name is not UTF-8."""
    return name.startswith(".") or name.endswith(TEMPORARY) or name == "lost+found" or not is_text(name)


def is_text(name: str) -> bool:
    """Return whether a path is UTF-8; Linux allows any bytes."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def escaped(name: str) -> str:
    """Show a path, with bytes that are not UTF-8 as \\xNN."""
    return os.fsencode(name).decode(errors="backslashreplace")


def is_adapter_file(name: str) -> bool:
    """Return whether a directory with such a file is an adapter's, valid or not."""
    return name == CONFIG or name.startswith(WEIGHTS_PREFIX)


def scan(directory: Path) -> Scan:
    """Scan a directory. Raises OSError if it cannot be listed, or its file system fails.

    A link that leads nowhere, and a sub-directory that may not be read, is one of `adapters`: it was meant to be one.
    """
    status = directory.stat()
    with os.scandir(directory) as entries:
        children = [one for one in entries if one.is_symlink() or one.is_dir()]
    unnamed = frozenset(escaped(one.name) for one in children if not is_text(one.name))
    found = Scan((status.st_dev, status.st_ino), {}, {}, unnamed)
    for child in children:
        if is_ignored(child.name):
            continue
        stamp, has_files = _look(child.path)
        if stamp:
            (found.adapters if has_files else found.others)[child.name] = stamp
    return found


def stamp_of(directory: Path) -> str:
    """Return a directory's stamp as in a scan; empty where there is none. Raises OSError if the file system fails."""
    return _look(str(directory))[0]


def _look(path: str) -> tuple[str, bool]:
    """Return the stamp of one sub-directory, and whether it has an adapter's files."""
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
    """Return whether a name is that of an adapter's file, or of an unfinished copy of one; not logs or checkpoints."""
    return "adapter_" in name or ".safetensors" in name


def _file_stamp(entry: os.DirEntry[str]) -> tuple[int, ...]:
    """Leave out the device's number: a volume that is mounted again may get another.

    The ctime changes with the content, also where a copy keeps the mtime, and with the mode and the owner.
    """
    try:
        status = entry.stat()
    except OSError as error:
        if error.errno not in _OWN_FAULT:
            raise
        return ()
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
