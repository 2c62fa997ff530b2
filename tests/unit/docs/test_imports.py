"""What `[tool.importlinter]` in pyproject.toml cannot say of imports, and that importing stays cheap."""

import graphlib
import json
import sys

import pytest

from tests.support.processes import python
from tests.support.sources import FILES, PACKAGES, ROOT, imports, module_of


def within(module, prefix):
    return module == prefix or module.startswith(f"{prefix}.")


def test_no_modules_import_each_other_in_a_circle():
    """However far around, also where only types are imported; import-linter knows circles of whole folders alone."""
    graph = {module_of(file): {m for m in imports(file) if m.split(".")[0] in PACKAGES} for file in FILES}
    graphlib.TopologicalSorter({module: found - {module} for module, found in graph.items()}).prepare()


def test_kernels_stand_on_arrays_alone():
    allowed = {*sys.stdlib_module_names, "kernels_cuda", "numpy", "torch", "cupy"}
    kernels = [file for file in FILES if within(module_of(file), "kernels_cuda")]
    found = {(module_of(file), name) for file in kernels for name in imports(file)}
    assert {(module, name) for module, name in found if name.split(".")[0] not in allowed} == set()


def test_channels_are_opened_in_one_place():
    opened = [module_of(file) for file in FILES if "_channel(" in file.read_text().replace("open_channel(", "")]
    assert opened == ["lora_server.wire.rpc"]


def test_no_test_imports_another():
    """What tests share is in tests/support."""
    tests = sorted((ROOT / "tests").rglob("test_*.py"))
    assert {(file.name, name) for file in tests for name in imports(file) if ".test_" in f".{name}"} == set()


SERVER = ["lora_server.control", "lora_server.daemon", "lora_server.shard", "lora_server.memory", "lora_server.cli"]
HEAVY = ["torch", "transformers", "grpc"]
HTTP = ["uvicorn", "starlette"]  # only a serving node needs it
COMMAND = """import contextlib
from typer.testing import CliRunner
from lora_server.cli import app
assert CliRunner().invoke(app, ['--help']).exit_code == 0"""
# in one interpreter, one after the other: a statement, and what must not be loaded after it
CHEAP = {
    "the server's side": [
        ("import lora_server, lora_server.spec, lora_server.placement, lora_server.errors", [*SERVER, *HEAVY, "numpy"]),
        ("import lora_server.transport.shm, lora_server.transport.tcp", [*SERVER, *HEAVY, "numpy"]),
        ("import client_connector", [*SERVER, *HEAVY, "typer", "pydantic"]),
        ("import provisioning, provisioning.cli", [*SERVER, *HEAVY, "numpy"]),
        (COMMAND, [*HEAVY, "lora_server.control", "lora_server.daemon", "peft"]),
    ],
    "an engine's side": [
        ("import client_connector.client", [*SERVER, "typer", "pydantic", "transformers", "peft"]),
        ("import client_connector.remote", [*SERVER, "typer", "pydantic", "transformers", "peft"]),
        ("import client_connector.transformers", [*SERVER, "typer", "pydantic", "transformers", "peft"]),
        ("from client_connector.transformers import attach", [*SERVER, "typer", "peft"]),
    ],
}


@pytest.mark.parametrize("side", CHEAP)
def test_importing_is_cheap(side):
    report = "\nprint(json.dumps(sorted(sys.modules)))\n"
    code = "import json, sys\n" + "".join(statement + report for statement, _ in CHEAP[side])
    done = python("-c", code)
    assert done.returncode == 0, done.stderr
    for (statement, absent), line in zip(CHEAP[side], done.stdout.splitlines(), strict=True):
        found = [m for m in json.loads(line) if any(within(m, prefix) for prefix in [*absent, *HTTP])]
        assert not found, f"{statement} loads {found[:10]}"
