"""What may succeed later says when: a 503 of the API server has a Retry-After."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from client_connector.serving.settings import KEY

LOOKUP = f"{KEY}_lookup"  # attribute of an OpenAIServingModels of ours
SECONDS = b"1"  # in which a controller is back, as a rule
Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Any, Send], Awaitable[None]]


def stacked(original: Any) -> Callable[..., App]:
    """The middleware of an application, in a layer of ours."""

    def build_middleware_stack(self: Any) -> App:
        inner: App = original(self)

        async def app(scope: Message, receive: Any, send: Send) -> None:
            async def said(message: Message) -> None:
                if message["type"] == "http.response.start" and message["status"] == 503 and _is_ours(self):
                    headers = list(message.get("headers", ()))
                    if all(name.lower() != b"retry-after" for name, _ in headers):
                        message = {**message, "headers": [*headers, (b"retry-after", SECONDS)]}
                await send(message)

            await inner(scope, receive, said)

        return app

    return build_middleware_stack


def _is_ours(app: Any) -> bool:
    """Whether its engine has a server."""
    models = getattr(app.state, "openai_serving_models", None)
    return hasattr(models, LOOKUP)
