"""The vLLM plugin (entry point `vllm.general_plugins`): adapters of a LoRA server as vLLM LoRA names.

settings   address, failure policy             version    supported vLLM versions
plan       scheduler -> workers, and back      holder     the scheduler's adapters, by request
step       a worker's forward pass             ops        opaque torch ops around dense GEMMs
experts    what stands in for Punica at the expert sites
hook       which vLLM attributes are touched, and the patching
frontend/, engine/, worker/, moe/   hooks of one vLLM part each
"""

from __future__ import annotations

import os

ACTIVE = "LORA_SERVER_VLLM_ACTIVE"  # set for the processes that an engine of ours starts


def register() -> None:
    """The entry point; runs in every vLLM process, any number of times.

    Without an address only `EngineArgs.create_engine_config` is wrapped, which looks for one in
    `--additional-config`. Raises ConfigError for a vLLM that is not supported, if an address is set.
    """
    import client_connector.vllm.hook as hook

    hook.watch()
    if os.environ.get(ACTIVE) or os.environ.get("LORA_SERVER_ADDRESS"):
        hook.install()
