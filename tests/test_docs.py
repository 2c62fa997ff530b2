"""What the documents point at exists."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def names_in(file: Path) -> set[str]:
    found = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{item.name}" for item in node.body if isinstance(item, ast.FunctionDef)}
    return found


@pytest.mark.parametrize("document", DOCS, ids=lambda path: path.name)
def test_references(document: Path):
    text = document.read_text()
    for path, name in re.findall(r"`([\w/]+\.py):([\w.]+)`", text):
        assert name in names_in(ROOT / path), f"{document.name}: {path}:{name}"
    for path in re.findall(r"`((?:lora_server|client_connector|kernels_cuda|provisioning|bench|tests)/[\w./]*)`", text):
        assert (ROOT / path).exists(), f"{document.name}: {path}"
    for link in re.findall(r"\]\((?!https?:)([^)#]+)\)", text):
        assert (document.parent / link).exists(), f"{document.name}: {link}"


def test_the_step_is_documented_with_functions():
    assert len(re.findall(r"`[\w/]+\.py:[\w.]+`", (ROOT / "docs/step.md").read_text())) > 25
