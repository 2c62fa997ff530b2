"""Every shell line of the documents is run, here or where the document says, or says why not."""

import os
import re

import pytest

from tests.support.doc_commands import SHELL, blocks, furnish, no_network, type_in
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
        assert not block.mark or block.language in SHELL
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


@pytest.mark.long
@pytest.mark.skipif(bool(NO_NETWORK), reason=NO_NETWORK)
@pytest.mark.timeout(LIMIT_SECONDS + 60)
@pytest.mark.parametrize("block", HERE, ids=name_of)
def test_commands_do_what_they_say(block, tmp_path):
    furnish(tmp_path)
    printed = type_in(block.commands, tmp_path, dict(os.environ), LIMIT_SECONDS)
    assert all(f"$ {command}" in printed for command in block.commands if "lora-server serve" not in command)
