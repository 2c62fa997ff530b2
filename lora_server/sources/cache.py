"""Files of far adapters on a node's disk, with a cap on their bytes, shared by the node's processes.

    DIR/lock                              held for moments, by who looks at the others or moves them
    DIR/VERSION.BYTES/                    an adapter, whole; VERSION is the digest of its content
    DIR/fetching-VERSION.BYTES.RANDOM/    one that comes: its bytes are reserved. Or one that goes

`.held` in each directory is locked (flock) as long as somebody reads or writes it, and not longer than that process
lives. So nothing has to be told to anybody, and what a killed process left is found.
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

HELD = ".held"
COMING = "fetching-"
LOCK_SECONDS, LOCK_PAUSE = 30.0, 0.002
RESOLUTION_NS = 1_000_000_000


class Kept(NamedTuple):
    """A directory of the cache."""

    path: Path
    version: str  # empty while it is not known
    nbytes: int
    whole: bool


class Lease:
    """An adapter's files, which stay until `close`. `stamp` is what Adapter.stamp was when they had this content."""

    def __init__(self, path: Path, version: str, descriptor: int) -> None:
        self.path, self.version = path, version
        self.stamp = (path / HELD).read_text()
        self._descriptor = descriptor

    def close(self) -> None:
        """May be called again."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Claim(NamedTuple):
    """A directory for an adapter that comes."""

    path: Path
    nbytes: int
    descriptor: int


class DiskCache:
    """Any number of them, in any process and thread, may be of one directory."""

    def __init__(self, directory: Path, capacity: Size) -> None:
        """A share is of the whole file system. Raises ConfigError for a directory that cannot be used."""
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
        self._listed: tuple[int, list[Kept]] = 0, []  # when the directory was changed last, and what it had then

    def take(self, version: str) -> Lease | None:
        """What is here."""
        with self._alone():
            return self._lease(version)

    def claim(self, version: str, nbytes: int) -> Claim | None:
        """A place for so many bytes; others go for it. None while somebody else brings that version, or everything
        is in use. Raises AdapterSourceError for what can never fit."""
        if nbytes > self.capacity:
            raise AdapterSourceError(
                f"it has {size(nbytes)}, and --disk-cache-size is {size(self.capacity)}: give the disk cache more"
            )
        with self._alone():
            for one in self._kept():
                if not one.whole and self._is_unheld(one):
                    shutil.rmtree(one.path, ignore_errors=True)
            if version and any(one.version == version for one in self._kept()):
                return None
            if not self._make_room(nbytes):
                return None
            path = self.directory / f"{COMING}{version}.{nbytes}.{secrets.token_hex(8)}"
            path.mkdir(mode=0o700)
            descriptor = os.open(path / HELD, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return Claim(path, nbytes, descriptor)

    def keep(self, claim: Claim, version: str, stamp: str) -> Lease:
        """It is whole, and has been looked at."""
        os.write(claim.descriptor, stamp.encode())
        for file in claim.path.iterdir():
            sync(file)
        sync(claim.path)
        with self._alone():
            lease = self._lease(version)
            if lease is not None:  # the same content under another name
                self.abandon(claim)
                return lease
            path = self.directory / f"{version}.{claim.nbytes}"
            claim.path.rename(path)
            sync(self.directory)
            fcntl.flock(claim.descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return Lease(path, version, claim.descriptor)

    def abandon(self, claim: Claim) -> None:
        """It does not come."""
        shutil.rmtree(claim.path, ignore_errors=True)
        os.close(claim.descriptor)

    def discard(self, version: str) -> None:
        """Its files are not what they were."""
        with self._alone():
            for one in self._kept():
                if one.whole and one.version == version and self._is_unheld(one):
                    self._remove(one)

    def versions(self) -> frozenset[str]:
        """What is here, and whole."""
        return frozenset(one.version for one in self._kept_lately() if one.whole)

    def is_coming(self, version: str) -> bool:
        """Whether somebody brings it."""
        return bool(version) and any(one.version == version and not one.whole for one in self._kept())

    def nbytes(self) -> int:
        """Of all that is here or comes."""
        return sum(one.nbytes for one in self._kept_lately())

    def _kept_lately(self) -> list[Kept]:
        """Read again where the directory was changed, or has been within the resolution of its time."""
        try:
            changed = self.directory.stat().st_mtime_ns
        except FileNotFoundError:
            return []
        if changed != self._listed[0] or time.time_ns() - changed < RESOLUTION_NS:
            self._listed = changed, self._kept()
        return self._listed[1]

    # -- under the lock

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        deadline = time.monotonic() + LOCK_SECONDS
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)  # it was tidied up, perhaps
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

    def _kept(self) -> list[Kept]:
        try:
            found = sorted(self.directory.iterdir())
        except FileNotFoundError:
            return []
        return [one for path in found if (one := _parse(path)) is not None]

    def _lease(self, version: str) -> Lease | None:
        one = next((one for one in self._kept() if one.whole and one.version == version), None)
        if one is None:
            return None
        try:
            descriptor = os.open(one.path / HELD, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:  # somebody tidied up by hand
            self._remove(one)
            return None
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        os.utime(one.path)  # the least recently used goes first
        return Lease(one.path, version, descriptor)

    def _make_room(self, nbytes: int) -> bool:
        """Whether there is room now; nothing goes where that would not do."""
        kept = self._kept()
        over = sum(one.nbytes for one in kept) + nbytes - self.capacity
        missing = max(over, nbytes - shutil.disk_usage(self.directory).free)
        chosen = []
        for one in sorted((one for one in kept if one.whole), key=lambda one: one.path.stat().st_mtime_ns):
            if missing <= 0:
                break
            if self._is_unheld(one):
                chosen.append(one)
                missing -= one.nbytes
        if missing > 0:
            return False
        for one in chosen:
            self._remove(one)
            self.evictions += 1
        return True

    def _is_unheld(self, one: Kept) -> bool:
        """Whether nobody reads or writes it; under the lock, so nobody begins to."""
        try:
            descriptor = os.open(one.path / HELD, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return True
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        else:
            return True
        finally:
            os.close(descriptor)

    def _remove(self, one: Kept) -> None:
        going = self.directory / f"{COMING}.{one.nbytes}.{secrets.token_hex(8)}"
        one.path.rename(going)  # first: half of it is nothing
        shutil.rmtree(going, ignore_errors=True)


def _parse(path: Path) -> Kept | None:
    coming = path.name.startswith(COMING)
    version, *numbers = path.name.removeprefix(COMING).split(".")
    if len(numbers) != 1 + coming or not numbers[0].isdecimal():
        return None
    return Kept(path, version, int(numbers[0]), not coming)


def sync(path: Path) -> None:
    """It is on the disk: the content of a file, the names in a directory."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
