"""A pytest plugin, `-p tests.shuffle --shuffle SEED`: files in an order that the seed chooses, and the tests of
each file, too, unless the file sets `IN_ORDER = True` because its last test stops a server that the others use."""

from __future__ import annotations

import itertools
import random

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shuffle", type=int, default=0, help="seed of the order of tests; the same for all processes")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    dice = random.Random(config.getoption("--shuffle"))
    files = [list(group) for _, group in itertools.groupby(items, key=lambda item: item.path)]
    for tests in files:
        if not getattr(tests[0].getparent(pytest.Module).obj, "IN_ORDER", False):
            dice.shuffle(tests)
    dice.shuffle(files)
    items[:] = itertools.chain.from_iterable(files)
