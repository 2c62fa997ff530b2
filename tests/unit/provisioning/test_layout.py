"""The folders of provisioning: few, of small files, and imports go one way."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.sources import imports, module_of

ROOT = Path(__file__).parents[3] / "provisioning"
FILES = sorted(ROOT.rglob("*.py"))
FOLDERS = sorted({file.parent for file in FILES})
# A folder, or a file beside the folders, imports only what stands before it: so there is no circle.
ORDER = ("arrays", "inputs", "iar", "workload", "model", "simulation", "plan", "report", "watch", "cli", "__main__")


def part_of(module):
    return module.split(".")[1]


@pytest.mark.parametrize("file", [file for file in FILES if file != ROOT / "__init__.py"], ids=module_of)
def test_imports_go_one_way(file):
    own = part_of(module_of(file))
    found = {part_of(name) for name in imports(file) if name.startswith("provisioning.")}
    late = found - set(ORDER[: ORDER.index(own) + 1])
    assert not late, f"{module_of(file)} imports {sorted(late)}, expected only what comes before {own} in {ORDER}"


def test_the_package_itself_imports_nothing():
    assert not imports(ROOT / "__init__.py")


def test_there_are_at_most_eleven_folders():
    assert len(FOLDERS) <= 11
    assert all((folder / "__init__.py").exists() for folder in FOLDERS)


@pytest.mark.parametrize("file", FILES, ids=module_of)
def test_a_file_has_at_most_200_lines(file):
    assert len(file.read_text().splitlines()) <= 200


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_folder_says_what_is_in_it(folder):
    held = {file.stem for file in folder.glob("*.py")} | {file.parent.name for file in folder.glob("*/*.py")}
    words = set(re.findall(r"\w+", (folder / "__init__.py").read_text().split('"""')[1]))
    assert {name for name in held if not name.startswith("__")} <= words
