"""Servers and engines are shared: those of Mixtral by all files of a run, others by the tests of one file."""

import pytest

from client_connector.directory import AdapterDirectory
from tests.support.workload import merge, workload
from tests.vllm.engines import FORKS, Engine, Servers, serve


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
    record = merge(load.base, load.paths["fused"], "fused", out)
    return out, f"lora_server:fused@{record.version}"


@pytest.fixture(scope="session")
def mixtral_server(scratch):
    """Of all files that do not kill it."""
    with serve(workload("mixtral", "vllm"), "mixtral", scratch) as running:
        yield running


@pytest.fixture(scope="session")
def mixtral_engine(mixtral_server, scratch):
    base, log = workload("mixtral", "vllm").base, scratch / "engine-mixtral.log"
    with Engine(base, mixtral_server.address, log) as running:
        yield running


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
    with Engine(load.base, server.address, scratch / f"engine-{kind}.log") as running:
        yield running


@pytest.fixture(scope="module")
def servers(load, tmp_path_factory):
    """Servers that the tests of a file may kill."""
    with Servers(load, tmp_path_factory.mktemp("servers")) as made:
        yield made


@pytest.fixture(scope="module")
def directory(server):
    directory = AdapterDirectory(server.address)
    yield directory
    directory.close()
