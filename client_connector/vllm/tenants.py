"""One vLLM for many tenants: `vllm serve ... --middleware client_connector.vllm.tenants.Tenants`."""

from __future__ import annotations

from client_connector.serving.http import AsgiApp, Message
from client_connector.serving.tenants import EngineApi, TenantMiddleware

COMPUTE_PATHS = frozenset(
    {
        *("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/embeddings", "/v1/score"),
        *("/v1/rerank", "/v2/rerank", "/tokenize", "/detokenize", "/pooling", "/classify", "/score", "/rerank"),
        *("/v1/chat/completions/render", "/v1/completions/render", "/invocations"),
    }
)


def _is_base_model(scope: Message, model: str) -> bool:
    return bool(scope["app"].state.openai_serving_models.is_base_model(model))


API = EngineApi(
    health=frozenset({"/health", "/ping"}),
    compute=COMPUTE_PATHS,
    publish=frozenset({"/v1/load_lora_adapter", "/v1/unload_lora_adapter"}),
    models="/v1/models",
    metrics="/metrics",
    is_base_model=_is_base_model,
)


class Tenants(TenantMiddleware):
    """TenantMiddleware for vLLM's API server, which makes it with the application alone."""

    def __init__(self, app: AsgiApp) -> None:
        super().__init__(app, API)
