"""Service level objectives: `ttft_p95=250ms,tpot_avg=100ms`."""

from __future__ import annotations

from lora_server.errors import ConfigError
from lora_server.slo import Slo
from provisioning.inputs import InputError

__all__ = ["Slo", "parse"]


def parse(text: str) -> Slo:
    """Parse both objectives, in any order; raises InputError naming --slo."""
    try:
        return Slo.parse(text)
    except ConfigError as error:
        raise InputError(f"--slo: {error}") from None
