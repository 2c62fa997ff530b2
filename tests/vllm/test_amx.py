"""A worker on a CPU asks for AMX before it joins, let alone computes."""

from types import SimpleNamespace

import pytest
import torch

from client_connector.serving.settings import KEY, Settings
from client_connector.vllm.hooks import worker
from lora_server.errors import ConfigError


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_worker_that_is_refused_does_not_start(monkeypatch, dtype):
    asked = []

    def refuse(dtype):
        asked.append(dtype)
        raise ConfigError("start it with --dtype float32")

    monkeypatch.setattr(worker, "ask_for_amx", refuse)
    nobody = {KEY: Settings("127.0.0.1:1").as_config()}
    config = SimpleNamespace(additional_config=nobody, model_config=SimpleNamespace(dtype=dtype))
    with pytest.raises(ConfigError, match="--dtype float32"):
        worker._manager(None)(config, "cpu")
    assert asked == [dtype]


def test_stock_vllm_asks_for_nothing(monkeypatch):
    monkeypatch.setattr(worker, "ask_for_amx", None)
    assert worker._manager(lambda config, device: "stock")(SimpleNamespace(additional_config=None), "cpu") == "stock"
