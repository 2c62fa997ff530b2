"""Settings of a vLLM engine, which it keeps under our key in `--additional-config`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from client_connector.serving.settings import KEY, Settings, find

ACTIVE = "LORA_SERVER_VLLM_ACTIVE"  # set for the processes that an engine of ours starts


def configured(additional_config: object, environment: Mapping[str, str]) -> Settings | None:
    """Read the settings of an engine that is being configured; None if it uses no server. Raises ConfigError."""
    own = additional_config.get(KEY) if isinstance(additional_config, Mapping) else None
    return find(own, environment, f"additional_config[{KEY!r}]")


def of_engine(vllm_config: Any) -> Settings | None:
    """Return the settings that the front end stored in an engine's config; None for an engine without a LoRA server."""
    return configured(getattr(vllm_config, "additional_config", None), {})
