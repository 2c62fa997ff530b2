"""The vLLM plugin (entry point `vllm.general_plugins`): adapters of a LoRA server as vLLM LoRA names.

settings   where an engine keeps them        contract   which versions, and which attributes are touched
graphs     where captured graphs are cut              amx        asking the kernel for AMX
punica     remote experts, by the names that vLLM's LoRA experts call
logs       our lines in vLLM's own log
tenants    middleware of vLLM's API server for many tenants
hooks/     what is wrapped: install, frontend, engine, worker, moe; the only modules that import vLLM
"""

from __future__ import annotations

import os


def register() -> None:
    """Install the plugin: vLLM calls this entry point in each of its processes, any number of times.

    Without an address only `EngineArgs.create_engine_config` is wrapped, which looks for one in
    `--additional-config`. Raises ConfigError for a vLLM that is not supported, if an address is set.
    """
    from client_connector.vllm.hooks import install
    from client_connector.vllm.settings import ACTIVE

    install.watch()
    if os.environ.get("LORA_SERVER_TRANSPORT") in ("gpu", "nvshmem"):
        from lora_server.transport.environment import prepare_environment

        prepare_environment()
    if os.environ.get(ACTIVE) or os.environ.get("LORA_SERVER_ADDRESS"):
        install.install()
