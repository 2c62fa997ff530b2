"""A node's directories. Run directory: its shards' sockets, and the disk cache where that has no other place.

Every process that uses a run directory holds a shared lock on a file in it, which the kernel releases when the process
ends. So the next start of a node removes the directories of nodes that were killed. --data-dir is locked the same way,
by one node of each rank.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path

import structlog

from lora_server.errors import ConfigError

PREFIX, LOCK = "lora-server-", "in-use"
MAX_SOCKET_PARENT = 60  # a Unix socket's path holds 107
_FLOCK = "@hhqqi"  # struct flock of fcntl(2): type, whence, start, length, pid
log = structlog.get_logger()


@contextlib.contextmanager
def run_directory(data_dir: Path | None) -> Iterator[Path]:
    """Make a private directory (mode 0700), in data_dir if its path is short enough; remove stale ones."""
    parent = _parent(data_dir)
    remove_stale(parent)
    directory, held = _made(parent)
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        os.close(held)


@contextlib.contextmanager
def locked_data(data_dir: Path | None, node_rank: int) -> Iterator[None]:
    """Make --data-dir and keep it for this process. Raises ConfigError where another node of this rank uses it.

    The lock is a POSIX one: no fork inherits it, and any `close` of the file in this process would release it.
    """
    if data_dir is None:
        yield
        return
    _make_directory(data_dir)
    lock = _open_lock(data_dir, node_rank, os.O_CREAT)
    try:
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(_used_by(data_dir, node_rank, lock)) from None
        except OSError as error:
            raise _no_lock(data_dir, node_rank, error) from error
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        yield
    finally:
        os.close(lock)


def check_data_lock(data_dir: Path, node_rank: int) -> None:
    """Raise ConfigError where a node of this rank uses the directory now. Takes no lock."""
    try:
        lock = _open_lock(data_dir, node_rank)
    except FileNotFoundError:
        return
    try:
        asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        if struct.unpack(_FLOCK, fcntl.fcntl(lock, fcntl.F_GETLK, asked))[0] != fcntl.F_UNLCK:
            raise ConfigError(_used_by(data_dir, node_rank, lock))
    finally:
        os.close(lock)


def _lock_of(data_dir: Path, node_rank: int) -> Path:
    return data_dir / f"node-{node_rank}.lock"


def _open_lock(data_dir: Path, node_rank: int, flags: int = 0) -> int:
    try:
        return os.open(_lock_of(data_dir, node_rank), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | flags, 0o600)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise _no_lock(data_dir, node_rank, error) from error


def _no_lock(data_dir: Path, node_rank: int, error: OSError) -> ConfigError:
    return ConfigError(
        f"--data-dir {data_dir}: {_lock_of(data_dir, node_rank)} cannot be locked ({error.strerror}); expected a file "
        "of this user's on a file system with locks"
    )


def _used_by(data_dir: Path, node_rank: int, lock: int) -> str:
    holder = os.pread(lock, 300, 0).decode(errors="replace") or "another process"
    return (
        f"--data-dir {data_dir}: {holder} serves from it as node {node_rank}, expected one server per directory; stop "
        "that one, or give this one a directory of its own"
    )


def hold(directory: Path) -> int:
    """Mark a directory as in use until the returned descriptor is closed. Raises OSError where it is missing."""
    held = os.open(directory / LOCK, os.O_RDWR | os.O_CLOEXEC)
    fcntl.flock(held, fcntl.LOCK_SH)
    return held


def leave(directory: Path, held: int) -> None:
    """Remove the directory of a killed node, unless another process still uses it."""
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(directory, ignore_errors=True)


class DirectoryUse:
    """A child process's use of its node's run directory."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._parent, self._held = directory, os.getppid(), hold(directory)

    def end(self) -> None:
        """Remove the directory if its node was killed, unless another process still uses it."""
        if os.getppid() != self._parent:
            leave(self._directory, self._held)


def remove_stale(parent: Path) -> None:
    """Remove this user's and host's directories that no process uses."""
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
