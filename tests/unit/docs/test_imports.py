"""The import rule of shared/DESIGN.md, over the source of every package, and that importing stays cheap."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.sources import FILES, PACKAGES, ROOT, imports, module_of

LEAVES = {
    "lora_server",
    "lora_server.spec",
    "lora_server.placement",
    "lora_server.errors",
    "lora_server.config",
    "lora_server.address",
    "lora_server.ports",
    "lora_server.logs",
    "lora_server.installed",
    "lora_server.units",
    "lora_server.histogram",
    "lora_server.host_memory",
    "lora_server.telemetry",
}
ENGINES = ("transformers", "vllm")
# who may import what of ours; a longer prefix goes before a shorter one
RULES = {
    **dict.fromkeys(LEAVES, LEAVES),
    "lora_server.wire": {*LEAVES, "lora_server.wire"},
    "lora_server.transport": {*LEAVES, "lora_server.wire", "lora_server.transport", "kernels_cuda"},
    "kernels_cuda": {"kernels_cuda"},
    "client_connector": {*LEAVES, "lora_server.wire", "lora_server.transport", "client_connector", "kernels_cuda"},
    "provisioning": {*LEAVES, "provisioning"},
}
BACKENDS = tuple(f"lora_server.transport.{name}" for name in ("inproc", "shm", "tcp", "cuda_ipc", "gpu", "nvshmem"))


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
        assert module.startswith("client_connector.") and (module.endswith(".hook") or ".hooks." in module), (
            f"{module} imports {engines}"
        )


@pytest.mark.parametrize("file", FILES, ids=module_of)
def test_only_the_daemon_and_the_connector_name_backends(file):
    """DESIGN: only `daemon` does; a client must also open what the server offered it."""
    module = module_of(file)
    if any(within(module, p) for p in ("lora_server.daemon", "lora_server.transport", "client_connector.remote")):
        return
    named = {m for m in imports(file) if m in BACKENDS}
    assert not named, f"{module} imports {sorted(named)}"


def test_there_is_no_circle():
    """Modules that import each other, however far around, also where only types are imported."""
    graph = {module_of(file): ours(imports(file)) - {module_of(file)} for file in FILES}
    done, path = set(), []

    def visit(module):
        assert module not in path, " -> ".join([*path[path.index(module) :], module])
        if module not in done:
            path.append(module)
            for imported in sorted(graph.get(module, ())):
                visit(imported)
            path.pop()
            done.add(module)

    for module in graph:
        visit(module)


@pytest.mark.parametrize("file", FILES, ids=module_of)
def test_the_server_knows_no_connector_and_engines_not_each_other(file):
    module, found = module_of(file), ours(imports(file))
    if within(module, "lora_server") and not within(module, "lora_server.demo"):
        assert not {m for m in found if within(m, "client_connector")}
        if not within(module, "lora_server.cli"):  # which starts it
            assert not {m for m in found if within(m, "lora_server.demo")}
    for engine in ENGINES:
        if within(module, f"client_connector.{engine}"):
            others = [f"client_connector.{other}" for other in ENGINES if other != engine]
            assert not {m for m in found for other in others if within(m, other)}
    if within(module, "client_connector.serving"):
        assert not {m for m in found for engine in ENGINES if within(m, f"client_connector.{engine}")}


def test_there_is_one_way_to_open_a_channel():
    opened = [module_of(file) for file in FILES if "_channel(" in file.read_text().replace("open_channel(", "")]
    assert opened == ["lora_server.wire.rpc"]


def test_tests_share_by_modules_of_their_own():
    tests = sorted((ROOT / "tests").rglob("test_*.py"))
    stray = {
        (file.name, name)
        for file in tests
        for name in imports(file)
        if name.split(".")[-1].startswith("test_") or ".test_" in name
    }
    assert not stray


def loaded_by(statement):
    """The modules that a fresh interpreter has after a statement."""
    code = f"import sys\n{statement}\nprint(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True
    )
    return set(done.stdout.splitlines()[-1].split())


SERVER = ["lora_server.control", "lora_server.daemon", "lora_server.shard", "lora_server.memory", "lora_server.cli"]
HEAVY = ["torch", "transformers", "grpc"]
HTTP = ["uvicorn", "starlette"]  # for who serves a node, and nobody else
CHEAP = [
    ("import client_connector", [*SERVER, *HEAVY, "typer", "pydantic"]),
    ("import client_connector.client", [*SERVER, "typer", "pydantic", "transformers", "peft"]),
    ("import client_connector.remote", [*SERVER, "typer", "pydantic", "transformers", "peft"]),
    ("import client_connector.transformers", [*SERVER, "typer", "pydantic", "transformers", "peft"]),
    ("from client_connector.transformers import attach", [*SERVER, "typer", "peft"]),
    ("import lora_server, lora_server.spec, lora_server.placement, lora_server.errors", [*SERVER, *HEAVY, "numpy"]),
    ("import lora_server.transport.shm, lora_server.transport.tcp", [*SERVER, *HEAVY, "numpy"]),
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
