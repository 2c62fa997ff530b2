"""Collects, on a host with a network, what a GPU's host without one lacks: wheels for its Python, and peers' kernels.

    python -m bench.fetch_gpu [--out bench/out/gpu] [--python python3.12] [--no-check]

The wheels are what pyproject.toml's dependencies (and tests, transformers, NVSHMEM) need beyond bench/gpu_image.txt,
at the versions of constraints.txt or those below. Then everything that can be imported without torch and CUDA is
imported under that Python, from the carried wheels alone beside small packages of the image. Needs pip and a network.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from bench import fetch_peers, gpu_check
from bench.gpu_run import carried
from bench.gpu_run.state import ROOT
from lora_server.demo import children

OUT = Path("bench/out/gpu")
IMAGE = ROOT / "bench/gpu_image.txt"
MOST_BYTES = 64 << 20  # the tree and what is carried, together
PIP_SECONDS = 600
# where constraints.txt has another version than fits the image, or none
PINS = {
    "grpcio-health-checking": "1.75.1",  # the oldest that we support runs beside every newer grpcio
    "grpcio-reflection": "1.75.1",
    "nvshmem4py-cu13": "0.4.1",  # 0.3.1 and 0.4.1 go with host library 3.4.5
    "nvidia-cuda-cccl": "13.0.85",
}
MORE = ("nvidia-cuda-cccl", "pytest", "pytest-timeout", "hypothesis", "psutil", "peft", "safetensors")
EXTRAS = ("server", "provision", "transformers", "cuda")
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in range(39, 4, -1)]
PLATFORMS += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64"]
ENVIRONMENT = {
    "python_version": carried.PYTHON, "python_full_version": f"{carried.PYTHON}.3", "sys_platform": "linux",
    "platform_system": "Linux", "platform_machine": "x86_64", "os_name": "posix", "implementation_name": "cpython",
    "platform_python_implementation": "CPython", "extra": "",
}  # fmt: skip


class CarryError(Exception):
    """Something cannot be collected; the text says what and why."""


def image() -> dict[str, tuple[str, bool]]:
    """Read the image's packages: name -> (version or "", whether it is large)."""
    found = {}
    for line in IMAGE.read_text().splitlines():
        name, _, note = line.partition("#")
        if name.strip():
            package, _, version = name.strip().partition("==")
            found[canonicalize_name(package)] = version, note.strip().startswith("large")
    return found


def pins() -> dict[str, str]:
    """Read the pinned versions: name -> version, PINS before constraints.txt."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = (line.split("==") for line in lines if "==" in line and not line.startswith("#"))
    return {**{canonicalize_name(name): version for name, version in pairs}, **PINS}


def roots() -> list[Requirement]:
    """List the requirements: the dependencies and extras that a GPU's host runs, and the tests' own."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [line for extra in EXTRAS for line in project["optional-dependencies"][extra]]
    return [Requirement(line) for line in (*project["dependencies"], *extras, *MORE)]


def download(name: str, folder: Path) -> Path:
    """Download a package's wheel for the image's Python; raises CarryError."""
    version = pins().get(name)
    if version is None:
        raise CarryError(f"{name}: no version known; add it to constraints.txt or to PINS in bench/fetch_gpu.py")
    before = set(folder.glob("*.whl"))
    pip_download([f"{name}=={version}"], folder)
    (found,) = set(folder.glob("*.whl")) - before
    return found


def pip_download(wanted: list[str], folder: Path) -> None:
    """Download wheels for the image's Python without their dependencies; raises CarryError."""
    platforms = [flag for platform in PLATFORMS for flag in ("--platform", platform)]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", *platforms]
    command += ["--python-version", carried.PYTHON, "--implementation", "cp", "--dest", str(folder), *wanted]
    done = subprocess.run(children.own(command), capture_output=True, text=True, timeout=PIP_SECONDS)
    if done.returncode:
        raise CarryError(
            f"{', '.join(wanted)}: pip download ended with {done.returncode}: {done.stderr.strip()[-400:]}"
        )


def needs(wheel: Path) -> list[Requirement]:
    """Read a wheel's dependencies on the image, without extras."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA") and name.count("/") == 1)
        lines = Parser().parsestr(archive.read(name).decode()).get_all("Requires-Dist") or []
    found = [Requirement(line) for line in lines]
    return [one for one in found if one.marker is None or one.marker.evaluate(ENVIRONMENT)]


def collect(folder: Path) -> list[Path]:
    """Download every wheel that is needed and not in the image into an emptied folder; raises CarryError."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    there, wheels = image(), {}
    left = [(one, "pyproject.toml") for one in roots()]
    while left:
        wanted, by = left.pop()
        name = canonicalize_name(wanted.name)
        if name in there:
            _fits(wanted, there[name][0], by)
        elif name not in wheels:
            wheels[name] = download(name, folder)
            left += [(one, wheels[name].name) for one in needs(wheels[name])]
    return sorted(wheels.values())


def _fits(wanted: Requirement, version: str, by: str) -> None:
    """Raise CarryError if the image's version is known and is not one that the wheel needs."""
    if version and by != "pyproject.toml" and not wanted.specifier.contains(Version(version), prereleases=True):
        raise CarryError(f"{by} needs {wanted}, and the image has {version}: pin another version of {by}")


def tree_bytes() -> int:
    """Sum the sizes of the working tree's files: those that git tracks or would add."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout.decode()
    paths = [ROOT / name for name in listed.split("\0") if name]
    return sum(path.stat().st_size for path in paths if path.is_file())


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def find_python(given: str | None) -> str:
    """Find an interpreter of the image's version that runs; raises CarryError."""
    for name in [given] if given else [f"python{carried.PYTHON}", "python3", "python"]:
        path = shutil.which(name)
        if path is None:
            continue
        try:  # what is on the PATH may be a wrapper without an interpreter behind it
            code = "import sys; print('%d.%d' % sys.version_info[:2], sys.executable)"
            said = subprocess.run([path, "-c", code], capture_output=True, text=True, timeout=30).stdout.split()
        except (OSError, subprocess.TimeoutExpired):
            continue
        if said[:1] == [carried.PYTHON]:
            return said[1]
    raise CarryError(f"no Python {carried.PYTHON} that runs; give --python PATH, or --no-check")


def check(python: str, folder: Path) -> dict[str, Any]:
    """Import the carried packages and ours under that Python; raises CarryError if an import fails."""
    with tempfile.TemporaryDirectory(prefix="lora-carry-") as scratch:
        work = Path(scratch)
        subprocess.run([python, "-m", "venv", "--without-pip", str(work / "venv")], check=True, timeout=120)
        for wheel in [*carried.wheels(folder), *small(work / "wheels")]:
            carried.unpack_wheel(wheel, work / "site")
        done = subprocess.run(
            children.own([str(work / "venv/bin/python"), str(gpu_check.__file__), str(ROOT), str(work / "site")]),
            capture_output=True, text=True, timeout=PIP_SECONDS, cwd=work,
        )  # fmt: skip
    if done.returncode:
        raise CarryError(f"the check under {python} broke: {done.stderr.strip()[-800:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def small(folder: Path) -> list[Path]:
    """The image's packages that are not large, at its version, or constraints.txt's, or the newest."""
    known = pins()
    versions = {name: version or known.get(name) for name, (version, large) in image().items() if not large}
    pip_download([f"{name}=={version}" if version else name for name, version in versions.items()], folder)
    return sorted(folder.glob("*.whl"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--python", help=f"a Python {carried.PYTHON}, to check imports with")
    parser.add_argument("--no-check", action="store_true", help="import nothing")
    parser.add_argument("--no-peers", action="store_true", help="leave the peers' files as they are")
    given = parser.parse_args()
    try:
        run(given)
    except CarryError as error:
        sys.exit(str(error))


def run(given: argparse.Namespace) -> None:
    """Collect, measure, check; raises CarryError."""
    python = None if given.no_check else find_python(given.python)
    wheels = collect(given.out / "wheels")
    peers = {} if given.no_peers else fetch_peers.collect(given.out / "peers")
    found = {} if python is None else check(python, given.out)
    manifest = {
        "python": carried.PYTHON,
        "wheels": {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in wheels},
        "imported": found.get("imported", []),
        "not_imported": found.get("not_imported", {}),
    }
    (given.out / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    report(given.out, wheels, found)
    failed = {**found.get("failed", {}), **{name: one["error"] for name, one in peers.items() if "error" in one}}
    total = folder_bytes(given.out) + tree_bytes()
    if failed:
        raise CarryError("\n".join(f"{name}: {reason}" for name, reason in failed.items()))
    if total > MOST_BYTES:
        raise CarryError(f"{total / 2**20:.1f} MiB with the tree, expected at most {MOST_BYTES >> 20}: carry less")


def report(out: Path, wheels: list[Path], found: dict[str, Any]) -> None:
    for path in wheels:
        print(f"{path.stat().st_size / 2**20:7.2f} MiB  {path.name}")
    print(f"{folder_bytes(out) / 2**20:7.2f} MiB  {out} in all, beside {tree_bytes() / 2**20:.2f} MiB of sources")
    if not found:
        print("imports were not checked")
        return
    print(
        f"imported under Python {found['python']}: {len(found['imported'])} modules; {found['compiled']} files compile"
    )
    for reason, names in found["not_imported"].items():
        print(f"not imported, {reason}: {len(names)} modules, such as {', '.join(names[:4])}")


if __name__ == "__main__":
    main()
