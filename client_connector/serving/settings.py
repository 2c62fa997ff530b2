"""Settings of a serving engine: the environment, or the engine's own configuration."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from lora_server.address import ControllerList
from lora_server.errors import ConfigError
from lora_server.timings import DEFAULTS, Timings

KEY = "lora_server"  # names what is ours in an engine's configuration, paths and answers
ADDRESS = "LORA_SERVER_ADDRESS"
ENVIRONMENT = {
    "address": ADDRESS,
    "transport": "LORA_SERVER_TRANSPORT",
    "wire": "LORA_SERVER_WIRE",
    "on_failure": "LORA_SERVER_ON_FAILURE",
    "slo_class": "LORA_SERVER_SLO_CLASS",
    "timeout_seconds": "LORA_SERVER_TIMEOUT_SECONDS",
    "world_seconds": "LORA_SERVER_WORLD_SECONDS",
}
TIMINGS = "LORA_SERVER_TIMINGS"
NUMBERS = ("timeout_seconds", "world_seconds")
ERROR, BASE_MODEL = "error", "base_model"
LAUNCHED = ("gpu", "nvshmem")  # transports over which kernels send and wait, and CUDA graphs hold their launches
OF = "|"  # between a tenant and its name of an adapter; no adapter's name contains it


def tenant_and_name(name: str) -> tuple[str, str]:
    """Split what a request asks for: the tenant ('' if none is named), and the adapter's name."""
    tenant, of, rest = name.partition(OF)
    return (tenant, rest) if of else ("", name)


@dataclass(frozen=True)
class Settings:
    """Settings. `on_failure`: the policy for a request after a failed step; `timeout_seconds` bounds a step and a join.

    `address`: with a standby both, with a comma between them. `wire`: one of connect.WIRES, that the server must have.
    `slo_class`: one of its --classes.
    `world_seconds`: over nvshmem, how long a worker waits when it starts until all of its world are there.
    `served_names`: the engine's names of its base model, which the engine's configuration says.
    `timings`: for tests and experiments, an object; from the environment as JSON.
    """

    address: str
    transport: str = "auto"
    wire: str = "any"
    on_failure: str = ERROR
    slo_class: str = ""
    timeout_seconds: float = 10.0
    world_seconds: float = 300.0
    served_names: tuple[str, ...] = ()
    timings: Timings = DEFAULTS

    def __post_init__(self) -> None:
        if self.on_failure not in (ERROR, BASE_MODEL):
            raise ConfigError(f"on_failure: got {self.on_failure!r}, expected {ERROR!r} or {BASE_MODEL!r}")
        try:
            ControllerList.parse(self.address)
        except ConfigError as error:
            raise ConfigError(f"{ADDRESS}: {error}") from None
        for name in NUMBERS:
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}: got {getattr(self, name)}, expected more than 0")

    @property
    def is_launched(self) -> bool:
        """Whether a pass is launches from end to end."""
        return self.transport in LAUNCHED

    def as_config(self) -> dict[str, Any]:
        """Return what `find` reads back."""
        return asdict(self)


def find(own: object, environment: Mapping[str, str], where: str = KEY) -> Settings | None:
    """Read an engine's configuration `own` (HOST:PORT, or an object of settings), which wins over the
    environment field by field; None if neither has an address.

    Raises ConfigError, which names `where`, for an unknown field or a value that cannot be one.
    """
    given: dict[str, Any] = {name: environment[key] for name, key in ENVIRONMENT.items() if environment.get(key)}
    if isinstance(own, str):
        own = {"address": own}
    if own is not None and not isinstance(own, Mapping):
        raise ConfigError(f"{where}: got {own!r}, expected HOST:PORT or an object of settings")
    given |= own or {}
    if not given.get("address"):
        return None
    unknown = sorted(set(given) - {field.name for field in fields(Settings)})
    if unknown:
        raise ConfigError(f"{where}: got {unknown}, expected some of {list(ENVIRONMENT)}")
    for name in NUMBERS:
        try:
            given[name] = float(given.get(name, getattr(Settings, name)))
        except (TypeError, ValueError):
            raise ConfigError(f"{name}: got {given[name]!r}, expected a number of seconds") from None
    given["timings"] = _timings(given.get("timings", environment.get(TIMINGS) or {}))
    return Settings(**given)


def _timings(given: Any) -> Timings:
    try:
        given = json.loads(given) if isinstance(given, str) else given
        return given if isinstance(given, Timings) else Timings(**given)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"timings: got {given!r}, expected an object of numbers of seconds ({error})") from None
