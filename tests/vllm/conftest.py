"""Servers and engines are shared: those of Mixtral by all files of a run, others by the tests of one file."""

import pytest

from lora_server.adapters import validate_adapter
from lora_server.merge import Merge
from tests.support.workload import workload
from tests.vllm.engines import FORKS, Engine, serve


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
def merged(load, tmp_path_factory):
    """A model directory whose weights contain `fused`, and a path by which vLLM's front end names that version."""
    out = tmp_path_factory.mktemp("merged") / "out"
    adapter, version = validate_adapter(load.paths["fused"], load.spec)
    with adapter:
        Merge(load.base, adapter, version, "fused", out).run()
    return out, f"lora_server:fused@{version}"


@pytest.fixture(scope="session")
def mixtral_server(scratch):
    """Of all files that do not kill it."""
    with serve(workload("mixtral", "vllm"), "mixtral", scratch) as running:
        yield running


@pytest.fixture(scope="session")
def mixtral_engine(mixtral_server, scratch):
    running = Engine(workload("mixtral", "vllm").base, mixtral_server.address, scratch / "engine-mixtral.log")
    yield running
    running.close()


@pytest.fixture(scope="module")
def server(request, load, kind, scratch):
    if kind == "mixtral":
        yield request.getfixturevalue("mixtral_server")
        return
    with serve(load, kind, scratch) as running:
        yield running


@pytest.fixture(scope="module")
def engine(request, load, kind, server, scratch):
    if kind == "mixtral":
        yield request.getfixturevalue("mixtral_engine")
        return
    running = Engine(load.base, server.address, scratch / f"engine-{kind}.log")
    yield running
    running.close()
