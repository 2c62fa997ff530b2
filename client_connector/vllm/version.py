"""The versions of vLLM that the plugin was made for."""

from __future__ import annotations

import re

from lora_server.errors import ConfigError

FIRST, BELOW = (0, 32), (0, 34)
SUPPORTED = f">={FIRST[0]}.{FIRST[1]},<{BELOW[0]}.{BELOW[1]}"


def check_version(version: str) -> None:
    """Raise ConfigError for a vLLM that the plugin was not made for."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None or not FIRST <= (int(found[1]), int(found[2])) < BELOW:
        raise ConfigError(
            f"vLLM: got version {version}, expected {SUPPORTED}; install a supported vLLM, "
            "or unset LORA_SERVER_ADDRESS to run this one without the LoRA server"
        )
