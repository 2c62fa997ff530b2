"""One SGLang for many tenants: what each kind of caller may use of its API, where LORA_SERVER_TENANTS is true."""

from __future__ import annotations

from collections.abc import Mapping

from client_connector.serving.tenants import EngineApi
from lora_server.errors import ConfigError

TENANTS = "LORA_SERVER_TENANTS"
API = EngineApi(
    health=frozenset({"/health", "/ping"}),
    compute=frozenset(
        {
            *("/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens", "/v1/embeddings"),
            *("/tokenize", "/v1/tokenize", "/detokenize", "/v1/detokenize"),
        }
    ),
    publish=frozenset({"/load_lora_adapter", "/unload_lora_adapter"}),
    models="/v1/models",
    metrics="/metrics",
)


def has_tenants(environment: Mapping[str, str]) -> bool:
    """Return whether callers have to show tokens; raises ConfigError for a value that is neither true nor false."""
    value = environment.get(TENANTS, "false").lower()
    if value not in ("true", "false"):
        raise ConfigError(f"{TENANTS}: got {value!r}, expected true or false")
    return value == "true"
