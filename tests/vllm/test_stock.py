"""The plugin installed, but no address set: stock vLLM. And a vLLM that is not supported."""

import subprocess
import sys

import pytest

from lora_server.demo.engine import Sequence
from tests.support.workload import NEW_TOKENS, workload
from tests.vllm.engines import ENVIRONMENT, Engine

ROUND = [Sequence([3 + i * 11 % 200 for i in range(12)], None)]


@pytest.mark.parametrize("kind", ["mixtral"], indirect=True)
def test_without_an_address_it_is_stock_vllm(load, kind, scratch):
    """The same numbers as with the plugin switched off, and none of its classes."""
    replies, classes = [], []
    experts = "type(llm.llm_engine.model_executor.driver_worker.worker.model_runner.model.model.layers[0]"
    experts += ".block_sparse_moe.experts.routed_experts.quant_method.moe_kernel.fused_experts).__name__"
    for name, environment in (("with", {}), ("without", {"VLLM_PLUGINS": ""})):
        with Engine(load.base, None, scratch / f"stock-{name}.log", environment, fresh=True) as engine:
            replies.append(engine.generate(ROUND, NEW_TOKENS))
            classes.append(engine.call("evaluate", expression=experts))
            schedule = "sys.modules['vllm.v1.core.sched.scheduler'].Scheduler.schedule"
            assert not engine.call("evaluate", expression=f"getattr({schedule}, '_lora_server_wrapped', 0)")
            assert engine.call("evaluate", expression="llm.llm_engine.vllm_config.lora_config is None")
            ours = "[m for m in ('client_connector.remote', 'client_connector.client') if m in sys.modules]"
            assert engine.call("evaluate", expression=ours) == []
        assert "LoRA server" not in engine.log.read_text()
    assert replies[0] == replies[1], "bit for bit"
    assert classes[0] == classes[1] != "RemoteCPUExperts"


def test_own_loras_of_vllm_work_as_before(scratch):
    """A dense model with vLLM's LoRA, the plugin installed and no address."""
    load = workload("llama", "vllm")
    with Engine(load.base, None, scratch / "stock-lora.log", fresh=True, enable_lora=True, max_lora_rank=8) as engine:
        index = load.names.index("attention")
        (reply,) = engine.generate([load.batch[index]], NEW_TOKENS, path=str(load.paths["attention"]))
        assert reply["tokens"] == load.expected[index].tokens


def test_an_unsupported_vllm_is_refused_at_start():
    """tests/unit/client/test_vllm_plugin.py has which versions those are."""
    code = "import vllm; vllm.__version__ = '0.34.0'\nfrom client_connector.vllm import register; register()"
    environment = {**ENVIRONMENT, "PATH": "/usr/bin:/bin", "LORA_SERVER_ADDRESS": "127.0.0.1:7400"}
    for refused in (True, False):
        how = {"env": environment, "capture_output": True, "text": True, "timeout": 120, "check": False}
        done = subprocess.run([sys.executable, "-c", code], **how)
        assert bool(done.returncode) == refused
        assert ("got version 0.34.0, expected >=0.32,<0.34" in done.stderr) == refused
        environment.pop("LORA_SERVER_ADDRESS", None)
