"""Every shell line of the documents is run, here or where the document says, or says why not; and set-up by make."""

import importlib.util
import os
import pty
import re
import subprocess
import sys
import zipfile

import pytest

from lora_server.demo import children
from tests.support.doc_commands import SHELL, blocks, furnish, no_network, type_in
from tests.support.serving import HANG_SECONDS
from tests.support.sources import ROOT

PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "deploy/README.md")] + [*(ROOT / "docs").glob("*.md")]
BLOCKS = [block for page in PAGES for block in blocks(str(page.relative_to(ROOT)))]
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
IN_CI = set(re.findall(r"^make ([a-z-]+)", (ROOT / ".ci/run").read_text(), re.MULTILINE))
NO_NETWORK = no_network()
LIMIT_SECONDS = 600.0  # 10 s on an idle machine, each


def name_of(block):
    return f"{block.document}:{' '.join(block.commands[0].split()[:2])}"


def made(block):
    """The targets of a block of nothing but `make`."""
    found = [re.fullmatch(r"make ([a-z-]+)", command) for command in block.commands]
    return [match[1] for match in found] if all(found) else []


HERE = [block for block in BLOCKS if block.language in SHELL and not block.mark and not made(block)]


def test_every_block_has_a_language():
    """Otherwise a command could hide in it; what is none says text."""
    assert [name_of(block) for block in BLOCKS if not block.language] == []


def test_a_mark_gives_its_reason_or_its_test():
    for block in BLOCKS:
        assert not block.mark or block.language in {*SHELL, "python"}
        if block.mark == "not run":
            assert len(block.why) > 10
        elif block.mark:
            assert block.document in (ROOT / block.why).read_text(), f"{block.why} does not run {block.document}"


def test_targets_that_are_named_exist_and_ci_runs_those_of_blocks():
    texts = [page.read_text() for page in [*PAGES, ROOT / "CHANGELOG.md", ROOT / "SECURITY.md"]]
    named = {name for text in texts for words in re.findall(r"`make ([a-z -]+)", text) for name in words.split()}
    typed = {target for block in BLOCKS for target in made(block)}
    assert named | typed <= TARGETS and {"demo", "test"} <= typed
    assert {target for target in typed if not {target, f"{target}-all"} & IN_CI} == set()


def test_plain_make_says_what_there_is():
    """Every target that a person types, each with what it is for."""
    said = {target: run(["make", *target], ROOT, capture_output=True) for target in ((), ("help",))}
    text = said[()].stdout
    assert [one.returncode for one in said.values()] == [0, 0] and said[("help",)].stdout == text
    steps = {"gpu-carry", "gpu-build", "proto", "test-fast", "bench-vllm", "browser", "postgres", "launchers", "help"}
    assert TARGETS - steps - set(re.findall(r"[a-z-]+", text)) == set()
    assert max(map(len, text.splitlines())) <= 120


@pytest.mark.long
@pytest.mark.skipif(bool(NO_NETWORK), reason=NO_NETWORK)
@pytest.mark.timeout(LIMIT_SECONDS + 60)
@pytest.mark.parametrize("block", HERE, ids=name_of)
def test_commands_do_what_they_say(block, tmp_path):
    furnish(tmp_path)
    printed = type_in(block.commands, tmp_path, dict(os.environ), LIMIT_SECONDS)
    assert all(f"$ {command}" in printed for command in block.commands if "lora-server serve" not in command)


SCRIPT = ROOT / "deploy/environment.py"
NO_INDEX = os.environ | {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": ""}


def test_a_python_that_will_not_do_is_told_why_in_one_line():
    spec = importlib.util.spec_from_file_location("environment", SCRIPT)
    environment = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(environment)
    said = environment.problem((3, 10), ["venv", "ensurepip"])
    assert "got Python 3.10, expected 3.11 or later; install one, then say which: make" in said
    without = environment.problem((3, 11), ["venv"])
    assert "has no ensurepip: install it (Debian, Ubuntu: apt install python3-venv), or another" in without
    assert "\n" not in said + without and environment.problem((3, 13), ["venv", "ensurepip"]) == ""


def run(command, folder, **more):
    how = {"env": NO_INDEX, "text": True, "timeout": HANG_SECONDS, "check": False} | more
    return subprocess.run(children.own(command), cwd=folder, **how)


def wheel(folder):
    with zipfile.ZipFile(folder / "nothing-1-py3-none-any.whl", "w") as file:
        file.writestr("nothing.py", "")
        file.writestr("nothing-1.dist-info/METADATA", "Metadata-Version: 2.1\nName: nothing\nVersion: 1\n")
        file.writestr("nothing-1.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr("nothing-1.dist-info/RECORD", "")


@pytest.mark.long
def test_set_up_says_what_it_does_and_what_failed(tmp_path):
    for name in ("Makefile", "deploy", "pyproject.toml", "constraints.txt"):
        (tmp_path / name).symlink_to(ROOT / name)
    done = run(["make", "demo", f"PYTHON={sys.executable}"], tmp_path, capture_output=True)
    assert done.returncode and "setting up .venv: " in done.stdout
    assert "No matching distribution found" in done.stderr and "error: .venv is not complete" in done.stderr
    assert (tmp_path / ".venv/bin/pip").exists() and not (tmp_path / ".venv/ready").exists()
    wheel(tmp_path)
    again = [sys.executable, str(SCRIPT), ".venv", "0.1", "--find-links", ".", "nothing", "--", "nothing"]
    ours, theirs = pty.openpty()
    done = run(again, tmp_path, stdout=theirs)  # what is written fits into the terminal's buffer
    text = os.read(ours, 65536).decode()
    os.close(theirs), os.close(ours)
    assert done.returncode == 0 and text.startswith("setting up .venv: downloads, 0.1 GiB")
    assert "Installing 1 packages" in text or "Successfully installed nothing-1" in text
    assert "already satisfied" not in text
    assert text.endswith("\r\033[K") and text.count("\n") == 1, "one line, and nothing of it stays"
