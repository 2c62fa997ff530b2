"""A node's run directory: its shards' sockets, and the disk cache where that has no other place.

Who uses it holds a shared lock on a file in it; nobody has to be alive to give that back. So what was killed altogether
leaves a directory that the next start of a node knows as nobody's.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import structlog

from lora_server.errors import ConfigError

PREFIX, LOCK = "lora-server-", "in-use"
MAX_SOCKET_PARENT = 60  # a Unix socket's path holds 107
log = structlog.get_logger()


@contextlib.contextmanager
def run_directory(data_dir: Path | None) -> Iterator[Path]:
    """A private one (mode 0700), in data_dir where its path is short enough; those that nobody uses are removed."""
    parent = _parent(data_dir)
    remove_stale(parent)
    directory, held = _made(parent)
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        os.close(held)


def hold(directory: Path) -> int:
    """It is used until this descriptor is closed, or its process is gone. Raises OSError where it is not there."""
    held = os.open(directory / LOCK, os.O_RDWR | os.O_CLOEXEC)
    fcntl.flock(held, fcntl.LOCK_SH)
    return held


def leave(directory: Path, held: int) -> None:
    """After its node was killed: the last of its processes removes it."""
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(directory, ignore_errors=True)


def remove_stale(parent: Path) -> None:
    """Those of this user and host that nobody uses."""
    for directory in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            _remove_if_stale(directory)


def _remove_if_stale(directory: Path) -> None:
    if directory.is_symlink() or directory.stat().st_uid != os.geteuid():
        return
    lock = os.open(directory / LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        if os.read(lock, 1000).decode() != socket.gethostname():  # on a file system that hosts share
            return
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(directory)
        log.info("removed what a killed server left", directory=str(directory))
    finally:
        os.close(lock)


def _made(parent: Path) -> tuple[Path, int]:
    while True:
        directory = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        with contextlib.suppress(FileNotFoundError):  # another node that starts took it for stale
            (directory / LOCK).write_text(socket.gethostname())
            held = hold(directory)
            if (directory / LOCK).exists():
                return directory, held
            os.close(held)


def _parent(data_dir: Path | None) -> Path:
    if data_dir is not None:
        _make_directory(data_dir)
    parents = [data_dir.resolve()] if data_dir is not None else []
    short = [parent for parent in (*parents, Path(tempfile.gettempdir())) if len(str(parent)) <= MAX_SOCKET_PARENT]
    if not short:
        raise ConfigError(
            f"sockets: {tempfile.gettempdir()} is longer than {MAX_SOCKET_PARENT} characters, too long for a Unix "
            "socket; set TMPDIR, or --data-dir, to a shorter path"
        )
    return short[0]


def _make_directory(data_dir: Path) -> None:
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryDirectory(dir=data_dir).cleanup()
    except OSError as error:
        raise ConfigError(
            f"--data-dir {data_dir}: cannot be made or written to ({error.strerror}); expected a directory where "
            "this user may create files: choose another, or leave it away"
        ) from error
