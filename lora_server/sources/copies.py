"""The server's own copies of adapters that were added from this host: later changes of the originals do not matter.

    DIR/VERSION/           a complete copy
    DIR/coming-RANDOM/     a copy that is being made, or that a killed process left

Copies are not evicted; `keep` deletes those of versions that are not needed any more.
"""

from __future__ import annotations

import contextlib
import errno
import secrets
import shutil
import threading
from collections.abc import Collection
from pathlib import Path

import structlog

from lora_server.adapters import is_watched, validate_adapter
from lora_server.errors import AdapterError, AdapterSourceError, ConfigError
from lora_server.sources.cache import sync
from lora_server.spec import ModelSpec
from lora_server.units import size

COMING = "coming-"
log = structlog.get_logger()
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


class Copies:
    """The copies in a directory, by version. Thread-safe; only one process may use a directory."""

    def __init__(self, directory: Path, spec: ModelSpec) -> None:
        """Create the directory and delete incomplete copies; raises ConfigError if the directory cannot be used."""
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            for left in directory.glob(f"{COMING}*"):
                shutil.rmtree(left, ignore_errors=True)
        except OSError as error:
            raise ConfigError(
                f"--data-dir: {directory} cannot be made or written to ({error.strerror}); expected a directory where "
                "this user may create files: choose another"
            ) from error
        self._directory, self._spec, self._lock = directory, spec, threading.Lock()
        self._wanted: dict[str, int] = {}  # versions that callers of `take` have not finished with

    def take(self, path: Path, version: str) -> tuple[Path, str]:
        """Return the copy of an adapter and its stamp; copies the files if there is no copy, or a damaged one.

        The caller calls `done` once it has registered the version or given it up. Raises AdapterSourceError if the copy
        does not fit on the disk, or the files change meanwhile.
        """
        with self._lock:
            self._wanted[version] = self._wanted.get(version, 0) + 1
        try:
            return self._take(path, version)
        except BaseException:
            self.done(version)
            raise

    def find(self, version: str) -> Path | None:
        """Return the directory of a version's copy, None if there is none."""
        found = self._directory / version
        return found if found.is_dir() else None

    def done(self, version: str) -> None:
        """End a `take`: from now on `keep` decides whether the copy stays."""
        with self._lock:
            left = self._wanted.pop(version) - 1
            if left:
                self._wanted[version] = left

    def keep(self, versions: Collection[str]) -> None:
        """Delete the copies of all but these versions and those between `take` and `done`."""
        with self._lock:
            for one in self._directory.iterdir():
                if one.name not in versions and one.name not in self._wanted and not one.name.startswith(COMING):
                    self._delete(one)

    def _delete(self, copy: Path) -> None:
        going = self._directory / f"{COMING}{secrets.token_hex(8)}"
        with contextlib.suppress(FileNotFoundError):  # deleted by another thread
            copy.rename(going)  # first, so that no caller finds half of it
        shutil.rmtree(going, ignore_errors=True)

    def _take(self, path: Path, version: str) -> tuple[Path, str]:
        target = self._directory / version
        if target.is_dir():
            with contextlib.suppress(AdapterError):
                return target, self._check_same(target, version, path)
            log.error("the server's own copy of an adapter was changed; copying it again", directory=str(target))
            self._delete(target)
        coming = self._directory / f"{COMING}{secrets.token_hex(8)}"
        files = [one for one in path.iterdir() if is_watched(one.name) and one.is_file()]
        nbytes = sum(one.stat().st_size for one in files)
        try:
            if nbytes > shutil.disk_usage(self._directory).free:
                raise self._no_room(nbytes)
            coming.mkdir(mode=0o700)
            for one in files:
                shutil.copyfile(one, coming / one.name)
                sync(coming / one.name)
            stamp = self._check_same(coming, version, path)
            sync(coming)
            self._put(coming, target)
        except OSError as error:
            if error.errno in _NO_ROOM:
                raise self._no_room(nbytes) from error
            raise
        finally:
            shutil.rmtree(coming, ignore_errors=True)
        return target, stamp

    def _put(self, coming: Path, target: Path) -> None:
        with self._lock:
            if not target.is_dir():  # another thread has made the same copy
                coming.rename(target)
                sync(self._directory)

    def _check_same(self, coming: Path, version: str, path: Path) -> str:
        """Return the stamp of files with the content of this version. Raises AdapterError for other content."""
        adapter, found = validate_adapter(coming, self._spec)
        adapter.close()
        if found != version:
            raise AdapterSourceError(f"adapter source {path}: its files were changed while they were copied; try again")
        return adapter.stamp

    def _no_room(self, nbytes: int) -> AdapterSourceError:
        free = shutil.disk_usage(self._directory).free
        return AdapterSourceError(
            f"no room for the server's own copy of it: {size(nbytes)}, and {self._directory} has {size(free)} left; "
            "make room there, or start the server with --no-copy, which leaves files where they are"
        )
