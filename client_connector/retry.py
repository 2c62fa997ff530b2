"""Trying again while a server is away."""

from __future__ import annotations

import tenacity

from lora_server.errors import LoraServerError, ServerBusyError, ServerUnavailableError


def while_away(seconds: float, *others: type[LoraServerError]) -> tenacity.Retrying:
    """Calls until it no longer raises ServerUnavailableError, or one of `others`; at the deadline raises the last."""
    return tenacity.Retrying(
        retry=tenacity.retry_if_exception_type((ServerUnavailableError, *others)),
        stop=tenacity.stop_before_delay(seconds),
        wait=tenacity.wait_random(0.1, 0.4),
        reraise=True,
    )


def while_busy(seconds: float) -> tenacity.Retrying:
    """Likewise, while the server is there and has no answer yet."""
    return tenacity.Retrying(
        retry=tenacity.retry_if_exception_type(ServerBusyError),
        stop=tenacity.stop_before_delay(seconds),
        wait=tenacity.wait_random(0.1, 0.4),
        reraise=True,
    )
