"""One server and one engine per model and file."""

import os

import pytest

from lora_server.demo.launch import running_server
from tests.sglang.engines import SglangServer
from tests.support.serving import ANYWHERE, flags
from tests.support.workload import workload

os.environ["SGLANG_USE_CPU_ENGINE"] = "1"  # before SGLang is imported


@pytest.fixture(scope="module")
def kind(request):
    return getattr(request, "param", "mixtral")


@pytest.fixture(scope="module")
def load(kind):
    return workload(kind, "sglang")


@pytest.fixture(scope="module")
def server(load, tmp_path_factory):
    """Four shards, so that experts, layers and dense sites lie apart."""
    log = tmp_path_factory.mktemp("server") / "log"
    with running_server(log, flags(load, "--layout", "ep2-pp2", *ANYWHERE)) as running:
        yield running


@pytest.fixture(scope="module")
def engine(load, server, tmp_path_factory):
    with SglangServer(load.base, server.address, tmp_path_factory.mktemp("engine") / "log") as running:
        yield running
