"""Servers, engines and commands of these tests are forked, and each test has time for a busy machine."""

from pathlib import Path

import pytest

from lora_server.demo import children
from tests.support.workload import workload

TEST_SECONDS = 900.0  # for hangs alone; each wait has a deadline of its own


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(TEST_SECONDS))


@pytest.fixture(scope="module", autouse=True)
def forks(forked):
    """Fork instead of start, unless a test uses the fixture `fresh`."""


@pytest.fixture(scope="session")
def load():
    """The model of most tests, its adapters, and PEFT's answers."""
    return workload("mixtral")


@pytest.fixture
def fresh(monkeypatch):
    """Start processes: the test is about one that has no fork server's imports."""
    monkeypatch.setattr(children, "start", children.start.__wrapped__)
