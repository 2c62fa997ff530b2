"""Every vLLM attribute that the plugin touches is there; one that moves is named."""

from pathlib import Path

import pytest

from client_connector.serving.contract import Touched
from client_connector.vllm import contract
from client_connector.vllm.contract import CONTRACT
from tests.support.engine_contract import stray

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


@pytest.mark.parametrize("file", HOOKS, ids=lambda file: str(file.relative_to(PLUGIN)))
def test_whatever_a_hook_imports_or_wraps_is_in_the_contract(file):
    assert not stray(file, "vllm", CONTRACT)
