"""One vLLM for many tenants: `vllm serve ... --middleware client_connector.vllm.tenants.Tenants`."""

from __future__ import annotations

from typing import Any

from client_connector.serving.http import AsgiApp, Message
from client_connector.serving.settings import OF
from client_connector.serving.tenants import Caller, EngineApi, TenantMiddleware

COMPUTE_PATHS = frozenset(
    {
        *("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/embeddings", "/v1/score"),
        *("/v1/rerank", "/v2/rerank", "/tokenize", "/detokenize", "/pooling", "/classify", "/score", "/rerank"),
        *("/v1/chat/completions/render", "/v1/completions/render", "/invocations"),
    }
)


def _adapt(scope: Message, asked: dict[str, Any], caller: Caller) -> dict[str, Any]:
    """Put the tenant in front of the model's name, unless that is the base model's."""
    model = asked.get("model")
    if not caller.tenant or not model or scope["app"].state.openai_serving_models.is_base_model(model):
        return asked
    return asked | {"model": f"{caller.tenant}{OF}{model}"}


API = EngineApi(
    health=frozenset({"/health", "/ping"}),
    compute=COMPUTE_PATHS,
    publish=frozenset({"/v1/load_lora_adapter", "/v1/unload_lora_adapter"}),
    models="/v1/models",
    metrics="/metrics",
    adapt=_adapt,
)


class Tenants(TenantMiddleware):
    """TenantMiddleware for vLLM's API server, which makes it with the application alone."""

    def __init__(self, app: AsgiApp) -> None:
        super().__init__(app, API)
