"""Settings of `lora-server serve`: flag > environment (LORA_SERVER_*) > --config file > default."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, InitSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from lora_server.errors import ConfigError
from lora_server.placement import Layout


def split_address(text: str, what: str) -> tuple[str, int]:
    """host:port; raises ConfigError."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"{what}: got {text!r}, expected HOST:PORT such as 127.0.0.1:7400")
    return host.strip("[]"), int(port)


class ServeConfig(BaseSettings):
    """One node of a server. Rank 0 also runs the controller."""

    model_config = SettingsConfigDict(env_prefix="LORA_SERVER_", extra="forbid", frozen=True)

    base_model: str
    adapters: Path | None = None
    layout: str = "ep1-pp1"
    device: Literal["cpu", "cuda"] = "cpu"
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    pool_gib: float = Field(0.0, ge=0)
    listen: str = "127.0.0.1:7400"
    http: str = "127.0.0.1:7401"
    data_dir: Path | None = None
    nodes: int = Field(1, ge=1)
    node_rank: int = Field(0, ge=0)
    controller: str = ""
    advertise: str = ""
    max_step_rows: int = Field(256, ge=1, le=65536)
    slots: int = Field(4, ge=1, le=64)
    coordination: Literal["independent", "leader"] = "independent"
    threads: int = Field(1, ge=1)
    lease_seconds: float = Field(10.0, gt=0)

    @model_validator(mode="before")
    @classmethod
    def _dtype_of_the_device(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("device") == "cuda":
            return {"dtype": "bfloat16"} | values
        return values

    @field_validator("layout")
    @classmethod
    def _layout(cls, text: str) -> str:
        return str(Layout.parse(text))

    @field_validator("listen", "http")
    @classmethod
    def _address(cls, text: str) -> str:
        split_address(text, "address")
        return text

    @model_validator(mode="after")
    def _numbers(self) -> ServeConfig:
        if self.device == "cuda" and self.dtype == "float32":
            raise ValueError("dtype: --device cuda computes in bfloat16 or float16; give --dtype, the engine's")
        if self.device == "cpu" and self.pool_gib:
            raise ValueError("pool-gib: only --device cuda has a pool; leave it away")
        return self

    @model_validator(mode="after")
    def _node(self) -> ServeConfig:
        if self.node_rank >= self.nodes:
            raise ValueError(f"node-rank: got {self.node_rank}, expected it below --nodes {self.nodes}")
        if self.nodes > Layout.parse(self.layout).num_shards:
            raise ValueError(f"nodes: got {self.nodes}, but layout {self.layout} has fewer shards")
        if self.node_rank and not self.controller:
            raise ValueError("controller: a node of rank above 0 needs --controller HOST:PORT (node 0's --listen)")
        return self

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Flags come as init; `load` puts the file below the environment."""
        return init_settings, env_settings


def load(flags: dict[str, Any], file: Path | None = None) -> ServeConfig:
    """Merge the sources; `flags` holds only what was given. Raises ConfigError naming the setting."""
    below = _read(file) if file is not None else {}

    class WithFile(ServeConfig):
        @classmethod
        def settings_customise_sources(
            cls, settings_cls: type[BaseSettings], *sources: Any, **named: Any
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            given = ServeConfig.settings_customise_sources(settings_cls, *sources, **named)
            return *given, InitSettingsSource(settings_cls, below)

    try:
        return WithFile(**flags)
    except ValidationError as error:
        problems = "; ".join(_describe(dict(problem)) for problem in error.errors())
        raise ConfigError(problems) from None


def _describe(problem: dict[str, Any]) -> str:
    name = "-".join(str(part) for part in problem["loc"]).replace("_", "-")
    if problem["type"] == "missing":
        return f"--{name}: missing; give the flag, LORA_SERVER_{name.replace('-', '_').upper()} or a --config file"
    if problem["type"] == "extra_forbidden":
        return f"{name}: no such setting"
    text = str(problem["msg"]).removeprefix("Value error, ")
    return f"--{name}: {text}, got {problem['input']!r}" if name else text


def _read(file: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(file.read_text()) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"--config {file}: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"--config {file}: got a {type(values).__name__}, expected a mapping of settings")
    return {str(key).replace("-", "_"): value for key, value in values.items()}
