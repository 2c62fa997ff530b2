"""One SGLang for many tenants, where LORA_SERVER_TENANTS is true: what each kind of caller may use of its API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from client_connector.serving.http import Message
from client_connector.serving.tenants import Caller, EngineApi, RefusedCall
from lora_server.errors import ConfigError

TENANTS = "LORA_SERVER_TENANTS"
# fields of a body, and starts of headers, by which a request acts on the engine or on others. When a caller hangs up,
# SGLang aborts every request whose id begins with its `rid`; a `stop_regex` can keep the scheduler busy for ever.
FIELDS = (
    *("rid", "session_id", "session_params", "conversation_id", "priority", "custom_logit_processor", "stop_regex"),
    *("data_parallel_rank", "routed_dp_rank", "bootstrap_host", "bootstrap_port", "bootstrap_room", "custom_labels"),
)
HEADERS = (b"x-override-", b"x-data-parallel-rank", b"x-smg-routing-key", b"content-encoding")


def has_tenants(environment: Mapping[str, str]) -> bool:
    """Return whether callers have to show tokens; raises ConfigError for a value that is neither true nor false."""
    value = environment.get(TENANTS, "").lower()
    if value not in ("", "true", "false"):
        raise ConfigError(f"{TENANTS}: got {value!r}, expected true or false")
    return value == "true"


def _adapt(scope: Message, asked: dict[str, Any], caller: Caller) -> dict[str, Any]:
    """Refuse a tenant's fields and headers that act on others; return the body unchanged, since hooks of the front end
    put the tenant in front of adapters' names."""
    fields = [name for name in FIELDS if asked.get(name) is not None]
    headers = [name.decode("latin-1") for name, _ in scope["headers"] if name.lower().startswith(HEADERS)]
    if caller.tenant and (fields or headers):
        raise RefusedCall(403, f"{(fields + headers)[0]}: not for tenants, expected a request without it")
    return asked


API = EngineApi(
    health=frozenset({"/health", "/health_generate", "/ready", "/ping"}),
    compute=frozenset(
        {
            *("/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens", "/v1/embeddings"),
            *("/tokenize", "/v1/tokenize", "/detokenize", "/v1/detokenize"),
        }
    ),
    publish=frozenset({"/load_lora_adapter", "/unload_lora_adapter"}),
    models="/v1/models",
    metrics="/metrics",
    adapt=_adapt,
)
