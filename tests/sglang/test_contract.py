"""Every SGLang attribute that the plugin touches is there, and it touches no other."""

from pathlib import Path

import pytest

from client_connector.sglang import contract
from client_connector.sglang.contract import CONTRACT
from tests.support.engine_contract import stray

HOOKS = sorted(Path(contract.__file__).parent.glob("hooks/*.py"))


@pytest.mark.parametrize("touched", CONTRACT, ids=lambda touched: f"{touched.module}.{touched.name}")
def test_the_installed_sglang_keeps_it(touched):
    assert touched.problems() == []


@pytest.mark.parametrize("file", HOOKS, ids=lambda file: file.name)
def test_whatever_a_hook_imports_or_wraps_is_in_the_contract(file):
    assert not stray(file, "sglang", CONTRACT)
