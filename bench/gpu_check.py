"""Imports everything it can, in a Python that has nothing of its own: `python gpu_check.py ROOT SITE`.

Run by bench.fetch_gpu under the Python of a GPU's host; only the standard library is used. The last line of stdout
is JSON. A module that stops at one of LARGE was not checked further than that; any other error is a failure.
"""

from __future__ import annotations

import importlib
import io
import json
import platform
import sys
import warnings
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

LARGE = ("torch", "cupy", "cuda", "scipy", "matplotlib", "peft", "accelerate", "triton", "vllm")
PACKAGES = ("lora_server", "client_connector", "kernels_cuda", "bench")
DEEPER = ("grpc_health.v1.health", "grpc_reflection.v1alpha.reflection", "nvshmem.bindings",
          "transformers.models.mixtral", "starlette.applications", "uvicorn.server")  # fmt: skip


def carried(site: Path) -> list[str]:
    found = []
    for path in sorted(site.iterdir()):
        if (path / "__init__.py").exists() or path.suffix == ".py":
            found.append(path.stem)
        elif path.suffix == ".so":
            found.append(path.name.split(".")[0])
    return found


def sources(root: Path, package: str) -> list[Path]:
    """List a package's source files, without those in bench/out."""
    return [path for path in sorted((root / package).rglob("*.py")) if "out" not in path.relative_to(root).parts]


def modules(root: Path) -> list[str]:
    files = [path for package in PACKAGES for path in sources(root, package)]
    parts = [path.relative_to(root).with_suffix("").parts for path in files]
    return [".".join(one[:-1] if one[-1] == "__init__" else one) for one in parts if one[-1] != "__main__"]


def attempt(name: str) -> tuple[str, str]:
    """Import a module: ("imported", ""), ("not_imported", the missing module), or ("failed", the error)."""
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = (error.name or "").split(".")[0]
        if missing in LARGE:
            return "not_imported", f"no {missing} beside it"
        return "failed", f"{type(error).__name__}: {error}"
    except Exception as error:
        return "failed", f"{type(error).__name__}: {error}"
    return "imported", ""


def main() -> None:
    root, site = Path(sys.argv[1]), Path(sys.argv[2])
    sys.path[:0] = [str(root), str(site)]
    warnings.simplefilter("ignore")
    found: dict[str, object] = {"python": platform.python_version(), "compiled": 0}
    imported: list[str] = []
    stopped: dict[str, list[str]] = {}
    failed: dict[str, str] = {}
    for package in PACKAGES:
        for path in sources(root, package):
            compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
            found["compiled"] = int(str(found["compiled"])) + 1
    for name in (*carried(site), *DEEPER, *modules(root)):
        ending, reason = attempt(name)
        if ending == "imported":
            imported.append(name)
        elif ending == "not_imported":
            stopped.setdefault(reason, []).append(name)
        else:
            failed[name] = reason
    print(json.dumps({**found, "imported": imported, "not_imported": stopped, "failed": failed}))


if __name__ == "__main__":
    main()
