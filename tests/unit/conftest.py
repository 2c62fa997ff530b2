"""What unit tests of every part take: a clock that they move, a stack of what ends with them, a registry's database."""

import contextlib

import pytest

from lora_server.registry.database import FILE, Database
from tests.support.clocks import VirtualClock


@pytest.fixture
def clock():
    return VirtualClock()


@pytest.fixture
def stack():
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.fixture
def database(tmp_path):
    with contextlib.closing(Database(f"sqlite:///{tmp_path / FILE}")) as database:
        yield database
