"""Servers and engines are started once per kind of model and shared; see CONTRIBUTING for what runs where."""

from __future__ import annotations

import pytest

from lora_server.demo.launch import running_server
from tests.support.serving import ANYWHERE
from tests.support.workload import workload
from tests.vllm.engines import FORKS, Engine


@pytest.fixture(scope="session")
def scratch(tmp_path_factory):
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="session", autouse=True)
def _forks():
    yield
    FORKS.close()


@pytest.fixture(scope="module")
def kind(request):
    return getattr(request, "param", "mixtral")


@pytest.fixture(scope="module")
def load(kind):
    return workload(kind, "vllm")


@pytest.fixture(scope="module")
def server(load, kind, scratch):
    """Four shards, so that experts, layers and dense sites lie apart."""
    flags = ["--base-model", str(load.base), "--adapters", str(load.adapters), "--layout", "ep2-pp2", *ANYWHERE]
    with running_server(scratch / f"server-{kind}.log", flags) as running:
        yield running


@pytest.fixture(scope="module")
def engine(load, kind, server, scratch):
    running = Engine(load.base, server.address, scratch / f"engine-{kind}.log")
    yield running
    running.close()
