"""The commands of docs/vllm.md and README.md, as written: `vllm serve` and `make serve-vllm`, and curl."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from lora_server.demo import tiny
from tests.support.doc_commands import blocks, furnish, no_network, type_in
from tests.support.sources import ROOT
from tests.vllm.engines import ENVIRONMENT, START_SECONDS

MISSING = no_network() or ("" if shutil.which("curl") else "curl is not installed")
# what the page supposes: a server that runs, with an adapter of that name
BEFORE = [
    "lora-server serve --base-model ./Mixtral-8x7B --adapters ./adapters",
    "lora-server adapters add law ./law-v2",
]


pytestmark = [pytest.mark.skipif(bool(MISSING), reason=MISSING), pytest.mark.timeout(2 * START_SECONDS + 600)]


def answered(document, before, folder):
    """(model, number of tokens) of the answer that the document's curl gets."""
    (block,) = [one for one in blocks(document) if one.why == "tests/vllm/test_doc_commands.py"]
    environment = os.environ | ENVIRONMENT | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    printed = type_in([*before, *block.commands], folder, environment, 2 * START_SECONDS + 500)
    answer, _ = json.JSONDecoder().raw_decode(printed[printed.index('{"id"') :])
    return answer["model"], answer["usage"]["completion_tokens"]


def test_the_page_does_what_it_says(tmp_path):
    furnish(tmp_path, **tiny.FOR_VLLM)
    assert answered("docs/vllm.md", BEFORE, tmp_path) == ("law", 64)


def checkout(folder):
    """This one, with this environment, which is up to date."""
    for path in ROOT.iterdir():
        if not path.name.startswith("."):
            (folder / path.name).symlink_to(path)
    (folder / ".venv-vllm").mkdir()
    for path in Path(sys.prefix).iterdir():
        if path.name != "ready":
            (folder / ".venv-vllm" / path.name).symlink_to(path)
    (folder / ".venv-vllm/ready").touch()


def test_the_readme_leads_to_an_answer(tmp_path):
    checkout(tmp_path)
    assert answered("README.md", [], tmp_path) == ("pirate", 8)
