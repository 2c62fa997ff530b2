"""The peers' kernel files out of their published wheels, for a GPU host without a network.

    python -m bench.fetch_peers [--out bench/out/peers]

Needs pip and a network. A wheel is downloaded without its dependencies to a temporary folder; the Triton files
that `bench.kernels` loads are kept, with a manifest of versions and digests. Nothing of them is imported here.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from lora_server.demo import children

OUT = Path("bench/out/peers")
TIMEOUT_SECONDS = 1800
# what is downloaded, and the folders of it that are kept
WHEELS = {
    "vllm": ("vllm==0.33.0", ("vllm/lora/ops/triton_ops/",)),
    "sglang": ("sglang==0.5.23", ("sglang/kernels/ops/lora/common/",)),
}
PUNICA = "punica publishes no wheel (that name on PyPI is another project); its SGMV comes with vllm's files"


def extract(wheel: Path, folders: tuple[str, ...], out: Path) -> dict[str, str]:
    """The Python files of these folders of a wheel, and their sha256; raises ValueError if there is none."""
    found = {}
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if not (name.endswith(".py") and name.startswith(folders)) or ".." in Path(name).parts:
                continue
            content = archive.read(name)
            target = out / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
            found[name] = hashlib.sha256(content).hexdigest()
    if not found:
        raise ValueError(f"{wheel.name} has no Python file in {', '.join(folders)}; its layout has changed")
    return found


def fetch(peer: str, out: Path) -> dict[str, Any]:
    """One peer's files and where they come from; the reason where they could not be had."""
    requirement, folders = WHEELS[peer]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, requirement]
        try:
            subprocess.run(children.own(command), check=True, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
            (wheel,) = Path(folder).glob("*.whl")
            return {"requirement": requirement, "wheel": wheel.name, "files": extract(wheel, folders, out / peer)}
        except subprocess.CalledProcessError as error:
            return {"requirement": requirement, "error": error.stderr.strip()[-500:]}
        except (ValueError, subprocess.TimeoutExpired) as error:
            return {"requirement": requirement, "error": str(error)}


def there(peer: str, out: Path) -> dict[str, Any] | None:
    """Return an earlier run's entry if it is of the same version and no file has changed: wheels are large to fetch."""
    try:
        entry: dict[str, Any] = json.loads((out / "manifest.json").read_text())[peer]
        files = {name: hashlib.sha256((out / peer / name).read_bytes()).hexdigest() for name in entry["files"]}
    except (FileNotFoundError, KeyError, ValueError):
        return None
    return entry if entry["requirement"] == WHEELS[peer][0] and files == entry["files"] else None


def collect(out: Path) -> dict[str, Any]:
    """Fetch every peer's files and write the manifest; returns it, and prints a line for each peer."""
    out.mkdir(parents=True, exist_ok=True)
    manifest: dict[str, Any] = {peer: there(peer, out) or fetch(peer, out) for peer in WHEELS}
    manifest["punica"] = {"note": PUNICA}
    (out / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")
    for peer, entry in manifest.items():
        print(peer, entry.get("error") or entry.get("note") or f"{entry['wheel']}: {len(entry['files'])} files")
    return manifest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=OUT)
    manifest = collect(parser.parse_args().out)
    if any("error" in entry for entry in manifest.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
