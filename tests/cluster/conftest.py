"""One server over four hosts, and engines on two more; skipped where there can be no hosts."""

from pathlib import Path

import pytest

from tests.support.hosts import MISSING
from tests.support.workload import workload

TEST_SECONDS = 900.0  # for hangs alone; each wait has a deadline of its own


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(TEST_SECONDS))
            item.add_marker(pytest.mark.long)
            if MISSING:
                item.add_marker(pytest.mark.skip(reason=MISSING))


@pytest.fixture(scope="session")
def load():
    """The model, its adapters, and PEFT's answers."""
    return workload("mixtral")
