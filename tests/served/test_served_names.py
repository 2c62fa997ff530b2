"""An engine answers requests for its own names from the base model: an adapter of such a name would be hidden."""

import os

import pytest
from structlog.testing import capture_logs

from client_connector.serving.holder import Holder
from client_connector.serving.settings import Settings
from client_connector.vllm.settings import configured
from lora_server.demo.launch import launch, running_server
from lora_server.errors import ConfigError
from tests.support.serving import ANYWHERE, cli, flags, kill, kill_controller, status, until
from tests.support.workload import workload


def engine(address: str, *names: str) -> Holder:
    return Holder(Settings(address, served_names=names), lambda text: ())


def test_a_name_is_an_engines_or_an_adapters(tmp_path):
    load = workload("mixtral")
    add = ("adapters", "add", "base", str(load.paths["fused"]), "--server")
    with running_server(tmp_path / "log", ["--base-model", str(load.base), *ANYWHERE]) as server:
        holder = engine(server.address, "mixtral", "base")
        refused = cli(*add, server.address)
        assert refused.returncode == 1
        assert f"'base': engine {os.uname().nodename}:{os.getpid()} serves its base model" in refused.stderr

        kill_controller(server)
        assert cli(*add, server.address).returncode == 1, "the next controller knows it too"

        holder.close()
        assert cli(*add, server.address).returncode == 0
        with pytest.raises(ConfigError, match=r"served names .*'base'.*: \['base'\] are adapters of the server"):
            engine(server.address, "mixtral", "base")
        assert status(server.address).clients == 0, "it left"
        engine(server.address, "mixtral").close()


@pytest.mark.long
def test_a_server_that_comes_back_with_such_an_adapter_is_logged_as_an_error(tmp_path):
    """The engine stays: its other adapters, and its base model, are in use."""
    load = workload("mixtral")
    first = launch(tmp_path / "first", "--base-model", str(load.base))
    first.wait_ready()
    holder = engine(first.address, "fused")
    kill(first)
    again = flags(load, "--listen", first.address)
    with running_server(tmp_path / "second", again) as second, capture_logs() as lines:
        use = holder.hold("r", "experts", ())
        until(lambda: use.held is not None or use.failure is not None, "it is joined anew")
        assert use.failure is None
        (said,) = [line["error"] for line in lines if line["log_level"] == "error"]
        assert "['fused'] are adapters of the server" in said
        assert "hides adapters" in second.tail()
        holder.close()


def test_the_names_travel_in_the_engines_config():
    found = configured({"lora_server": Settings("h:1", served_names=("base", "mixtral")).as_config()}, {})
    assert found.served_names == ("base", "mixtral")
