"""Every vLLM attribute that the plugin touches is there; one that moves is named."""

import ast
from pathlib import Path

import pytest

from client_connector.serving.contract import Touched
from client_connector.vllm import contract
from client_connector.vllm.contract import CONTRACT

PLUGIN = Path(contract.__file__).parent
HOOKS = sorted((PLUGIN / "hooks").glob("*.py"))


@pytest.mark.parametrize("touched", CONTRACT, ids=lambda touched: f"{touched.module}.{touched.name}")
def test_the_installed_vllm_keeps_it(touched):
    assert touched.problems() == []


@pytest.mark.parametrize(
    ("touched", "words"),
    [
        (Touched("vllm.no_such_module", "Thing"), "vllm.no_such_module.Thing is gone"),
        (Touched("vllm.v1.core.sched.scheduler", "Scheduler.planned"), "Scheduler.planned is gone"),
        (Touched("vllm.v1.core.sched.scheduler", "Scheduler.schedule", ("speed",)), "has no parameter speed"),
        (Touched("vllm.v1.core.sched.scheduler", "Scheduler", (), ("nobody",)), "instances have no nobody"),
    ],
)
def test_what_moves_is_named(touched, words):
    (problem,) = touched.problems()
    assert words in problem


def imported(file: Path) -> set[tuple[str, str]]:
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "vllm":
            found |= {(node.module, alias.name) for alias in node.names}
    return found


@pytest.mark.parametrize("file", HOOKS, ids=lambda file: str(file.relative_to(PLUGIN)))
def test_whatever_a_hook_imports_or_wraps_is_in_the_contract(file):
    pinned = {(touched.module, touched.name.split(".")[0]) for touched in CONTRACT}
    modules = {touched.module for touched in CONTRACT}
    stray = {(module, name) for module, name in imported(file) if (module, name) not in pinned}
    stray = {(module, name) for module, name in stray if f"{module}.{name}" not in modules}
    assert not stray
    last = {touched.name.rpartition(".")[2] for touched in CONTRACT}
    calls = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)]
    names = [node.args[1] for node in calls if getattr(node.func, "id", "") == "wrap"]
    assert {name.value for name in names if isinstance(name, ast.Constant)} <= last | {"__init__"}
