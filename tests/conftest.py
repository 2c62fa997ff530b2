"""Every test runs on one thread without gradients; tests marked `cuda` or `emulator` skip where they cannot run."""

import os

import hypothesis
import pytest
import torch
from structlog.testing import capture_logs

from lora_server.demo import children

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
torch.set_num_threads(1)
hypothesis.settings.register_profile("tests", deadline=None)  # a machine may be busy
hypothesis.settings.load_profile("tests")
pytest.register_assert_rewrite("tests.support")  # asserts of what tests share say what they got, as those of tests do


def pytest_configure() -> None:
    """Every server and engine that a test starts has fast timings."""
    from tests.support.clocks import FAST, environment

    os.environ.update(environment(FAST))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    from tests.support.gpu.emulated import MISSING

    missing = {"cuda": "" if torch.cuda.is_available() else "no NVIDIA GPU here", "emulator": MISSING}
    for item in items:
        for mark, reason in missing.items():
            if reason and mark in item.keywords:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def fork_servers():
    from tests.support.forked import Forks

    forks = Forks()
    yield forks
    forks.close()


@pytest.fixture(scope="module")
def forked(fork_servers):
    """Servers, engines and commands that a file's tests start are forked: see tests.support.forked."""
    with fork_servers.instead_of(children):
        yield


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


@pytest.fixture(scope="session")
def tiny_adapters(tmp_path_factory):
    """Directories of tiny-mixtral adapters, by name."""
    from lora_server.demo import tiny

    model, root = tiny.make_model("mixtral"), tmp_path_factory.mktemp("adapters")
    made = {
        "all": {"lora_rank": 4, "targets": "all"},
        "down": {"lora_rank": 3, "targets": "down", "style": "per_expert"},
        "bf16": {"lora_rank": 5, "targets": "experts", "dtype": torch.bfloat16},
    }
    for seed, (name, settings) in enumerate(made.items()):
        tiny.make_adapter(model, root / name, seed=seed, **settings)
    tiny.make_shared_outer(model, root / "shared-outer", lora_rank=2, seed=9)
    return {path.name: path for path in root.iterdir()}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Two shards of tiny-mixtral in processes; a file that needs others has a fixture of this name."""
    from lora_server.demo.launch import running_server
    from tests.support.serving import flags
    from tests.support.workload import workload

    more = ("--layout", "ep2-pp1", "--grpc-reflection")
    with running_server(tmp_path_factory.mktemp("server") / "log", flags(workload("mixtral"), *more)) as running:
        yield running


@pytest.fixture(scope="module")
def quiet():
    """Keep what shards log about failed steps off the output."""
    with capture_logs():
        yield
