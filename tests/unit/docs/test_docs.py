"""What the documents point at exists: files, functions, constants and their values, commands, modules, links."""

import ast
import importlib
import re
from pathlib import Path

import pytest
import typer

ROOT = Path(__file__).parents[3]
PACKAGES = ("lora_server", "client_connector", "kernels_cuda", "provisioning")
TOP = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")
DOCS = [*(ROOT / name for name in TOP), *sorted((ROOT / "docs").glob("*.md"))]


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


def python_files():
    return sorted(file for package in PACKAGES for file in (ROOT / package).rglob("*.py") if "_pb2" not in file.name)


@pytest.mark.parametrize("document", DOCS, ids=lambda path: path.name)
def test_constants_have_the_values_that_documents_give(document: Path):
    """Written as `folder/file.py:NAME = value`."""
    for path, name, value in re.findall(r"`([\w/]+\.py):([A-Z_]+) = ([^`]+)`", document.read_text()):
        module = importlib.import_module(path.removesuffix(".py").replace("/", "."))
        assert getattr(module, name) == ast.literal_eval(value), f"{document.name}: {path}:{name}"


def commands():
    """Every command of the two programs, as it is typed."""
    from lora_server.cli import app as server
    from provisioning.cli import app as provision

    def walk(command, path):
        yield path
        for name, child in getattr(command, "commands", {}).items():
            yield from walk(child, f"{path} {name}")

    found = {"lora-server": server, "provision": provision}
    return {path for name, app in found.items() for path in walk(typer.main.get_command(app), name)}


def test_commands_that_are_named_exist():
    """In documents and in docstrings: `lora-server adapters frobnicate` is caught wherever it stands."""
    known, groups = commands(), {"lora-server", "lora-server adapters"}
    for file in [*DOCS, *python_files()]:
        for words in re.findall(r"\blora-server((?: [a-z]+)+)", file.read_text()):
            typed = "lora-server"
            for word in words.split():
                if typed not in groups or not _is_code(file, f"{typed} {word}"):
                    break
                typed = f"{typed} {word}"
                assert typed in known, f"{file.relative_to(ROOT)}: `{typed}` is no command"


def _is_code(file: Path, typed: str) -> bool:
    """Prose may go on after the program's name; code, in backticks or at the start of a line, may not."""
    return re.search(rf"(`|^|\n *){re.escape(typed)}\b", file.read_text()) is not None


def test_every_way_to_push_is_in_the_life_of_a_step():
    text = (ROOT / "docs/step.md").read_text()
    links = {
        name
        for file in (ROOT / "lora_server/transport").glob("*.py")
        for name in re.findall(r"^class (\w+Link)\(", file.read_text(), re.MULTILINE)
    }
    assert {name for name in links if name not in text} <= {"InprocLink"}


LISTED = [folder for package in PACKAGES for folder in [ROOT / package, *sorted((ROOT / package).rglob("*"))]]
LISTED = [folder for folder in LISTED if (folder / "__init__.py").exists()]


@pytest.mark.parametrize("folder", LISTED, ids=lambda folder: str(folder.relative_to(ROOT)))
def test_a_package_names_its_modules(folder: Path):
    docstring = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
    modules = {file.stem for file in folder.glob("*.py")} - {"__init__", "__main__"}
    modules = {name for name in modules if "_pb2" not in name}
    assert {name for name in modules if not re.search(rf"\b{name}\b", docstring)} == set()


def test_the_step_is_documented_with_functions():
    assert len(re.findall(r"`[\w/]+\.py:[\w.]+`", (ROOT / "docs/step.md").read_text())) > 25
