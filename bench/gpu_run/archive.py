"""The state that a call leaves for the next one, as its host may be gone by then: two archives, each below a limit.

results.tar.gz   the report, the kernels' JSON, and each stage's JSON, lines and log
cache.tar.gz     compiled kernels

`unpack` puts them back where they were, so that the next call goes on; what is there already stays.
"""

from __future__ import annotations

import io
import os
import tarfile
import zlib
from collections.abc import Iterable
from pathlib import Path

RESULTS, CACHE = "results.tar.gz", "cache.tar.gz"
MOST_BYTES = 15 << 20  # of an archive: a machine may give back files of up to 16 MiB
LOG_BYTES = 256 << 10  # of a log, its end
ENTRY_BYTES = 2 << 10  # of an archive for a file, beside its content
RAW, REPORTS = "raw", "reports"
CACHES = ("cupy", "triton")
RESULT_SUFFIXES = (".json", ".jsonl", ".log")  # in the order in which they find room


def pack(folder: Path, results: Path, reports: Iterable[Path]) -> list[str]:
    """Write both archives into `folder`, each whole or not at all; return the names that found no room."""
    folder.mkdir(parents=True, exist_ok=True)
    stages = sorted(
        (path for path in results.iterdir() if path.suffix in RESULT_SUFFIXES),
        key=lambda path: (RESULT_SUFFIXES.index(path.suffix), path.name),
    )
    found = {f"{REPORTS}/{path.name}": path for path in reports}
    found |= {f"{RAW}/{results.name}/{path.name}": path for path in stages}
    caches = [path for name in CACHES for path in sorted((results / name).rglob("*")) if path.is_file()]
    compiled = {f"{RAW}/{results.name}/{path.relative_to(results)}": path for path in caches}
    return [*_write(folder / RESULTS, found), *_write(folder / CACHE, compiled)]


def _write(archive: Path, files: dict[str, Path]) -> list[str]:
    draft, total, left = archive.with_suffix(".draft"), 0, []
    with tarfile.open(draft, "w:gz", compresslevel=6) as tar:
        for name, path in files.items():
            data = path.read_bytes()
            if path.suffix == ".log":
                data = data[-LOG_BYTES:]
            nbytes = len(zlib.compress(data)) + ENTRY_BYTES
            if total + nbytes > MOST_BYTES:
                left.append(name)
                continue
            total += nbytes
            _add(tar, name, data)
    os.replace(draft, archive)  # noqa: PTH105
    return left


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(data)
    tar.addfile(entry, io.BytesIO(data))


def unpack(folder: Path, raw: Path, reports: Path) -> int:
    """Put back what `folder` has archives of and is not there; return how many files. Raises ValueError."""
    places, count = {RAW: raw, REPORTS: reports}, 0
    for archive in (folder / RESULTS, folder / CACHE):
        if not archive.exists():
            continue
        try:
            with tarfile.open(archive) as tar:
                for entry in tar:
                    count += _restore(archive, tar, entry, places)
        except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
            raise ValueError(f"{archive} cannot be unpacked ({error}); remove it, or copy it here again") from error
    return count


def _restore(archive: Path, tar: tarfile.TarFile, entry: tarfile.TarInfo, places: dict[str, Path]) -> bool:
    """One file, if it has none of its name; whether it was written. Raises ValueError for a foreign name."""
    top, _, inside = entry.name.partition("/")
    if top not in places or not entry.isfile() or ".." in Path(inside).parts or Path(inside).is_absolute():
        raise ValueError(f"{archive}: got an entry {entry.name!r}, expected files of {RAW} and {REPORTS}")
    target, content = places[top] / inside, tar.extractfile(entry)
    if target.exists() or content is None:
        return False
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f"{target.name}.draft")
    draft.write_bytes(content.read())
    os.replace(draft, target)  # noqa: PTH105
    return True
