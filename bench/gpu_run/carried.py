"""Files carried to a GPU's host without a network: wheels, unpacked so that they can be imported, and peers' files."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import zipfile
from collections.abc import Mapping
from pathlib import Path

from bench.gpu_run.state import ROOT

STAMP = ".wheels"
TOOLKIT = "/usr/local/cuda/bin"  # where CUDA's tools are, if not on the PATH
PYTHON = "3.12"  # what the wheels are for


def wheels(carried: Path) -> list[Path]:
    """List the wheels that `bench.fetch_gpu` put there."""
    return sorted((carried / "wheels").glob("*.whl"))


def check(carried: Path) -> None:
    """Raises ValueError for a file that is no wheel."""
    for wheel in wheels(carried):
        if not zipfile.is_zipfile(wheel):
            raise ValueError(f"{wheel} is no wheel; collect them again: python -m bench.fetch_gpu")


def unused(carried: Path) -> str:
    """Explain why `unpack` returned None."""
    if not wheels(carried):
        return f"no wheels in {carried / 'wheels'}"
    return f"the wheels in {carried / 'wheels'} are for Python {PYTHON}, and this is {platform.python_version()}"


def unpack(carried: Path, site: Path) -> Path | None:
    """A folder for PYTHONPATH, made anew when the wheels are others; None if there are none for this Python."""
    found = wheels(carried)
    if not found or not platform.python_version().startswith(f"{PYTHON}."):
        return None
    digest = hashlib.sha256("".join(f"{path.name} {path.stat().st_size}\n" for path in found).encode()).hexdigest()
    stamp = site / STAMP
    if stamp.exists() and stamp.read_text() == digest:
        return site
    shutil.rmtree(site, ignore_errors=True)
    site.mkdir(parents=True)
    for wheel in found:
        unpack_wheel(wheel, site)
    stamp.write_text(digest)
    return site


def unpack_wheel(wheel: Path, site: Path) -> None:
    """Unpack a wheel's modules. Scripts are not needed: everything here is started as `python -m`."""
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            inside = _place(name)
            if inside is None or name.endswith("/"):
                continue
            target = site / inside
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(archive.read(name))


def _place(name: str) -> str | None:
    """Return the place of a wheel's file, also of one in NAME.data/purelib; None for a file that is no module."""
    parts = name.split("/")
    if ".." in parts or name.startswith("/"):
        return None
    if parts[0].endswith(".data"):
        return "/".join(parts[2:]) if parts[1] in ("purelib", "platlib") else None
    return name


def environment(site: Path | None, caches: Path, given: Mapping[str, str]) -> dict[str, str]:
    """Make the stages' environment: our sources and the wheels before installed packages; lasting caches of kernels."""
    paths = [str(ROOT), *([str(site)] if site else []), given.get("PYTHONPATH", "")]
    return {
        **given,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "PATH": os.pathsep.join([given.get("PATH", os.defpath), TOOLKIT]),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "CUPY_CACHE_DIR": str((caches / "cupy").resolve()),
        "TRITON_CACHE_DIR": str((caches / "triton").resolve()),
    }
