"""Reading the settings: flags, then the environment, then the --config file, then defaults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_settings import BaseSettings, InitSettingsSource, PydanticBaseSettingsSource, SettingsError

from lora_server.config.serve import ServeConfig
from lora_server.errors import ConfigError


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
    except SettingsError as error:
        raise ConfigError(f"environment: {error}") from None


def _describe(problem: dict[str, Any]) -> str:
    name = "-".join(str(part) for part in problem["loc"]).replace("_", "-")
    if problem["type"] == "missing":
        return f"--{name}: missing; give the flag, LORA_SERVER_{name.replace('-', '_').upper()} or a --config file"
    if problem["type"] == "extra_forbidden":
        return f"{name}: no such setting"
    text = str(problem["msg"]).removeprefix("Value error, ")
    if name and "got " not in text:
        text = f"{text}, got {problem['input']!r}"
    return f"--{name}: {text}" if name else text


def _read(file: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(file.read_text()) or {}
    except OSError as error:
        raise ConfigError(f"--config {file}: {error.strerror}; give a YAML file of settings") from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"--config {file}: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"--config {file}: got a {type(values).__name__}, expected a mapping of settings")
    return {str(key).replace("-", "_"): value for key, value in values.items()}
