"""Engine and server must run the same base model."""

from __future__ import annotations

from typing import Any

from lora_server.errors import GeometryMismatchError
from lora_server.spec import ModelSpec, from_config


def check_geometry(config: dict[str, Any], served: ModelSpec) -> None:
    """Raises GeometryMismatchError naming what differs; `config` is the engine's model's config.json."""
    own = from_config(config)
    if own.fingerprint() != served.fingerprint():
        differing = [
            f"{name} is {getattr(own, name)!r} here and {getattr(served, name)!r} there"
            for name in ModelSpec.__dataclass_fields__
            if name not in ("name", "assumed") and getattr(own, name) != getattr(served, name)
        ]
        raise GeometryMismatchError(
            f"the server serves another base model ({served.name}): {'; '.join(differing)}; "
            "start it with --base-model of this engine's model"
        )
