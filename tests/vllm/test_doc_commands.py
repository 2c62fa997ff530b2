"""The commands of docs/vllm.md, as written: `vllm serve` with every default, and curl, beside a server."""

from __future__ import annotations

import json
import os
import shutil

import pytest
from engines import ENVIRONMENT, START_SECONDS

from lora_server.demo import tiny
from tests.doc_commands import blocks, furnish, no_network, type_in

MISSING = no_network() or ("" if shutil.which("curl") else "curl is not installed")
# what the page supposes: a server that runs, with an adapter of that name
BEFORE = [
    "lora-server serve --base-model ./Mixtral-8x7B --adapters ./adapters",
    "lora-server adapters add law ./law-v2",
]


@pytest.mark.skipif(bool(MISSING), reason=MISSING)
@pytest.mark.timeout(2 * START_SECONDS + 600)
def test_the_page_does_what_it_says(tmp_path):
    (block,) = [one for one in blocks("docs/vllm.md") if one.mark == "run in"]
    furnish(tmp_path, **tiny.FOR_VLLM)
    environment = os.environ | ENVIRONMENT | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    printed = type_in([*BEFORE, *block.commands], tmp_path, environment, 2 * START_SECONDS + 500)
    answer, _ = json.JSONDecoder().raw_decode(printed[printed.index('{"id"') :])
    assert (answer["model"], answer["usage"]["completion_tokens"]) == ("law", 64)
