"""A controller with tokens: in SQLite, and in a PostgreSQL."""

import contextlib

import pytest

from tests.support.gated import Gated
from tests.support.postgres import DATABASES, database_of


@pytest.fixture(scope="module", params=DATABASES)
def gated(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp("gated")
    with database_of(request.param, directory) as url, contextlib.ExitStack() as stack:
        yield Gated(directory, stack, url)
