"""What an engine's hooks import and wrap, beside the contract of what they touch."""

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

from client_connector.serving.contract import Touched


def stray(file: Path, engine: str, contract: Sequence[Touched]) -> set[object]:
    """What a module imports from the engine, or wraps, and the contract lacks."""
    tree = ast.parse(file.read_text())
    pinned, modules = {(one.module, one.name.split(".")[0]) for one in contract}, {one.module for one in contract}
    imported = {(module, name) for module, name in _imported(tree, engine) if (module, name) not in pinned}
    last = {one.name.rpartition(".")[2] for one in contract} | {"__init__"}
    return {one for one in imported if ".".join(one) not in modules} | (set(_wrapped(tree)) - last)


def _imported(tree: ast.AST, engine: str) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == engine:
            yield from ((node.module, alias.name) for alias in node.names)


def _wrapped(tree: ast.AST) -> Iterator[str]:
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    names = [node.args[1] for node in calls if getattr(node.func, "id", "") == "wrap"]
    yield from (name.value for name in names if isinstance(name, ast.Constant) and isinstance(name.value, str))
