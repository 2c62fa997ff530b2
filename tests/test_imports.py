"""The import rule of shared/DESIGN.md, over the source of every package, and that importing stays cheap."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("lora_server", "client_connector", "kernels_cuda", "provisioning")
FILES = sorted(file for package in PACKAGES for file in (ROOT / package).rglob("*.py"))
LEAVES = {"lora_server", "lora_server.spec", "lora_server.placement", "lora_server.errors", "lora_server.config"}
ENGINES = ("transformers", "vllm")
# who may import what of ours; a longer prefix goes before a shorter one
RULES = {
    **dict.fromkeys(LEAVES, LEAVES),
    "lora_server.wire": {*LEAVES, "lora_server.wire"},
    "lora_server.transport": {*LEAVES, "lora_server.wire", "lora_server.transport"},
    "kernels_cuda": {"kernels_cuda"},
    "client_connector": {*LEAVES, "lora_server.wire", "lora_server.transport", "client_connector"},
    "provisioning": {*LEAVES, "provisioning"},
}
BACKENDS = tuple(f"lora_server.transport.{name}" for name in ("inproc", "shm", "zmq", "cuda_ipc", "nvshmem"))


def module_of(file):
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(file):
    """Every module that a file imports anywhere, TYPE_CHECKING included; of `from a import b` also a.b if it is one."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{file}: relative import"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            modules = {name for name in names if is_module(name)}
            found |= modules
            if modules != names:
                found.add(node.module)
    return found


def is_module(name):
    path = ROOT.joinpath(*name.split("."))
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def within(module, prefix):
    return module == prefix or module.startswith(f"{prefix}.")


def ours(modules):
    return {module for module in modules if module.split(".")[0] in PACKAGES}


@pytest.mark.parametrize("file", FILES, ids=module_of)
def test_a_file_imports_only_what_its_folder_may(file):
    module, found = module_of(file), imports(file)
    rule = next(
        (RULES[p] for p in sorted(RULES, key=len, reverse=True) if p != "lora_server" and within(module, p)), None
    )
    if rule is not None:
        exact, folders = rule & LEAVES, rule - LEAVES
        stray = {m for m in ours(found) if m not in exact and not any(within(m, folder) for folder in folders)}
        assert not stray, f"{module} imports {sorted(stray)}"
    if module.split(".")[0] == "kernels_cuda":
        outside = {m.split(".")[0] for m in found} - set(sys.stdlib_module_names)
        assert outside <= {"kernels_cuda", "numpy", "torch", "cupy"}, f"{module} imports {sorted(outside)}"
    engines = {m for m in found if m.split(".")[0] in ENGINES}
    if engines and not within(module, "lora_server.demo"):
        assert module.startswith("client_connector.") and module.endswith(".hook"), f"{module} imports {engines}"


@pytest.mark.parametrize("file", FILES, ids=module_of)
def test_only_the_daemon_and_the_connector_name_backends(file):
    """DESIGN: only `daemon` does; a client must also open what the server offered it."""
    module = module_of(file)
    if any(within(module, p) for p in ("lora_server.daemon", "lora_server.transport", "client_connector.remote")):
        return
    named = {m for m in imports(file) if m in BACKENDS}
    assert not named, f"{module} imports {sorted(named)}"


def loaded_by(statement):
    """The modules that a fresh interpreter has after a statement."""
    code = f"import sys\n{statement}\nprint(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True
    )
    return set(done.stdout.splitlines()[-1].split())


SERVER = ["lora_server.control", "lora_server.daemon", "lora_server.worker", "lora_server.memory", "lora_server.cli"]
HEAVY = ["torch", "transformers", "grpc"]
HTTP = ["uvicorn", "starlette"]  # for who serves a node, and nobody else
CHEAP = [
    ("import client_connector", [*SERVER, *HEAVY, "typer", "pydantic"]),
    ("import client_connector.client", [*SERVER, "typer", "pydantic", "transformers", "peft"]),
    ("import client_connector.remote", [*SERVER, "typer", "pydantic", "transformers", "peft"]),
    ("import client_connector.transformers", [*SERVER, "typer", "pydantic", "transformers", "peft"]),
    ("from client_connector.transformers import attach", [*SERVER, "typer", "peft"]),
    ("import lora_server, lora_server.spec, lora_server.placement, lora_server.errors", [*SERVER, *HEAVY, "numpy"]),
    ("import lora_server.transport.shm, lora_server.transport.zmq", [*SERVER, *HEAVY, "numpy"]),
    ("import provisioning, provisioning.cli", [*SERVER, *HEAVY]),
    (
        "import contextlib\nfrom typer.testing import CliRunner\nfrom lora_server.cli import app\n"
        "assert CliRunner().invoke(app, ['--help']).exit_code == 0",
        [*HEAVY, "lora_server.control", "lora_server.daemon", "peft"],
    ),
]


@pytest.mark.parametrize(("statement", "absent"), CHEAP, ids=[statement.split("\n")[-1] for statement, _ in CHEAP])
def test_importing_is_cheap(statement, absent):
    loaded = loaded_by(statement)
    found = sorted(m for m in loaded if any(within(m, prefix) for prefix in [*absent, *HTTP]))
    assert not found, f"{statement} loads {found[:10]}"
