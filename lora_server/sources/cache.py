"""Disk cache of remote adapters' files, of limited size, shared by the processes of a node.

    DIR/lock                              held for moments, by a process that reads or changes the cache
    DIR/VERSION.BYTES/                    a complete adapter; VERSION is the digest of its content
    DIR/fetching-VERSION.BYTES.RANDOM/    one that is being fetched, with its bytes reserved; or one being deleted

A process that reads or writes a directory has its `.held` locked (flock). The lock ends with the process, so processes
need no messages, and find what a killed one left.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from lora_server.errors import AdapterSourceError, ConfigError
from lora_server.units import Size, size

HELD, HELD_BYTES = ".held", 1 << 20
COMING = "fetching-"
LOCK_SECONDS, LOCK_PAUSE = 30.0, 0.002
RESOLUTION_NS = 1_000_000_000


class CachedAdapter(NamedTuple):
    """A directory of the cache."""

    path: Path
    version: str  # empty while it is not known
    nbytes: int
    complete: bool

    def is_unused(self) -> bool:
        """Return whether no process reads or writes it. The caller has the cache's lock, so none begins to."""
        try:
            descriptor = os.open(self.path / HELD, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return True
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        else:
            return True
        finally:
            os.close(descriptor)


class Lease:
    """Keeps an adapter's files in the cache until `close`. `stamp`: Adapter.stamp when they were checked."""

    def __init__(self, path: Path, version: str, descriptor: int) -> None:
        self.path, self.version = path, version
        said = os.pread(descriptor, HELD_BYTES, 0).decode(errors="replace")
        self.stamp = said.removeprefix(f"{version} ")  # equals no stamp if it is another version's
        self._descriptor = descriptor

    def close(self) -> None:
        """End the lease. Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Claim(NamedTuple):
    """A directory for an adapter that is being fetched, with its bytes reserved."""

    path: Path
    nbytes: int
    descriptor: int


class DiskCache:
    """Thread-safe; any number of processes may use one directory."""

    def __init__(self, directory: Path, capacity: Size) -> None:
        """`capacity`: a share is of the whole file system. Raises ConfigError for a directory that cannot be used."""
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            (directory / "lock").touch(mode=0o600)
            self.capacity = capacity.of(shutil.disk_usage(directory).total)
        except OSError as error:
            raise ConfigError(
                f"--disk-cache {directory}: cannot be made or written to ({error.strerror}); expected a directory "
                "where this user may create files: choose another"
            ) from error
        self.directory = directory
        self.evictions = 0  # by this object
        # when the directory was changed last, and what it had then
        self._listed: tuple[int, list[CachedAdapter]] = 0, []

    def take(self, version: str) -> Lease | None:
        """Lease a version that is in the cache."""
        with self._alone():
            return self._lease(version)

    def claim(self, version: str, nbytes: int) -> Claim | None:
        """Reserve a directory for so many bytes, and evict others for it. None while another process fetches that
        version, or all others are in use. Raises AdapterSourceError for more bytes than the cache may have."""
        if nbytes > self.capacity:
            raise AdapterSourceError(
                f"it has {size(nbytes)}, and --disk-cache-size is {size(self.capacity)}: give the disk cache more"
            )
        with self._alone():
            for one in self._list():
                if not one.complete and one.is_unused():
                    _delete(one.path)
            if version and any(one.version == version for one in self._list()):
                return None
            if not self._evict_for(nbytes):
                return None
            path = self.directory / f"{COMING}{version}.{nbytes}.{secrets.token_hex(8)}"
            path.mkdir(mode=0o700)
            descriptor = os.open(path / HELD, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return Claim(path, nbytes, descriptor)

    def keep(self, claim: Claim, version: str, stamp: str) -> Lease:
        """Turn a claim into a lease. Its files must be complete and checked."""
        os.write(claim.descriptor, f"{version} {stamp}".encode())
        for file in claim.path.iterdir():
            sync(file)
        sync(claim.path)
        with self._alone():
            lease = self._lease(version)
            if lease is not None:  # another URL had the same content
                self.abandon(claim)
                return lease
            path = self.directory / f"{version}.{claim.nbytes}"
            _touch(claim.path)
            claim.path.rename(path)
            sync(self.directory)
            fcntl.flock(claim.descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return Lease(path, version, claim.descriptor)

    def abandon(self, claim: Claim) -> None:
        """Give a claim up."""
        shutil.rmtree(claim.path, ignore_errors=True)
        os.close(claim.descriptor)

    def discard(self, version: str) -> None:
        """Delete a version with changed files, unless a process uses it."""
        with self._alone():
            for one in self._list():
                if one.complete and one.version == version and one.is_unused():
                    self._remove(one)

    def versions(self) -> frozenset[str]:
        """Return the versions that are complete."""
        return frozenset(one.version for one in self._list_cached() if one.complete)

    def is_fetching(self, version: str) -> bool:
        """Return whether a process fetches this version now."""
        return bool(version) and any(one.version == version and not one.complete for one in self._list())

    def nbytes(self) -> int:
        """Return the bytes that are used or reserved."""
        return sum(one.nbytes for one in self._list_cached())

    def _list_cached(self) -> list[CachedAdapter]:
        """List the cache, anew where its mtime changed, or is so recent that it may hide a change."""
        try:
            changed = self.directory.stat().st_mtime_ns
        except FileNotFoundError:
            return []
        if changed != self._listed[0] or time.time_ns() - changed < RESOLUTION_NS:
            self._listed = changed, self._list()
        return self._listed[1]

    # -- under the lock

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        deadline = time.monotonic() + LOCK_SECONDS
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)  # a user may have deleted it
        with (self.directory / "lock").open("a") as lock:
            while True:
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                if time.monotonic() > deadline:
                    raise AdapterSourceError(
                        f"the disk cache {self.directory} is locked for {LOCK_SECONDS:g} s; is a process stopped?"
                    )
                time.sleep(LOCK_PAUSE)
            yield

    def _list(self) -> list[CachedAdapter]:
        try:
            found = sorted(self.directory.iterdir())
        except FileNotFoundError:
            return []
        return [one for path in found if (one := _parse(path)) is not None]

    def _lease(self, version: str) -> Lease | None:
        one = next((one for one in self._list() if one.complete and one.version == version), None)
        if one is None:
            return None
        try:
            descriptor = os.open(one.path / HELD, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:  # deleted by hand, or not a directory of the cache
            self._remove(one)
            return None
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        with contextlib.suppress(OSError):  # another process removes it now
            _touch(one.path)
        return Lease(one.path, version, descriptor)

    def _evict_for(self, nbytes: int) -> bool:
        """Evict adapters to free so many bytes; whether they are free now. Evicts none where that is too little."""
        cached = self._list()
        over = sum(one.nbytes for one in cached) + nbytes - self.capacity
        missing = max(over, nbytes - shutil.disk_usage(self.directory).free)
        chosen = []
        for one in sorted((one for one in cached if one.complete), key=_last_use):
            if missing <= 0:
                break
            if one.is_unused():
                chosen.append(one)
                missing -= one.nbytes
        if missing > 0:
            return False
        for one in chosen:
            self._remove(one)
            self.evictions += 1
        return True

    def _remove(self, one: CachedAdapter) -> None:
        going = self.directory / f"{COMING}.{one.nbytes}.{secrets.token_hex(8)}"
        one.path.rename(going)  # first, so that no process finds half of it
        _delete(going)


def _touch(path: Path) -> None:
    """Note a use: the least recently used is evicted first."""
    now = time.time_ns()  # the file system's own clock stands still for milliseconds
    os.utime(path, ns=(now, now))


def _last_use(one: CachedAdapter) -> int:
    """Return when it was used last: 0 for an adapter that another process removes now; of a link its own time, as it
    may lead nowhere."""
    try:
        return one.path.lstat().st_mtime_ns
    except OSError:
        return 0


def _parse(path: Path) -> CachedAdapter | None:
    coming = path.name.startswith(COMING)
    version, *numbers = path.name.removeprefix(COMING).split(".")
    if len(numbers) != 1 + coming or not numbers[0].isdecimal():
        return None
    return CachedAdapter(path, version, int(numbers[0]), not coming)


def _delete(path: Path) -> None:
    """Delete a directory, or a link or file that was put in its place; what cannot be deleted stays."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
        return
    with contextlib.suppress(OSError):
        path.unlink()


def sync(path: Path) -> None:
    """Flush a file's content, or a directory's names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
