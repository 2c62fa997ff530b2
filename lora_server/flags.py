"""Command-line flags out of a settings class: its fields, defaults and descriptions are the only list of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, get_args, get_origin

import typer
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings

_PLAIN = (bool, int, float, Path)  # anything else is parsed by the class, from the text


def flags_of(settings: type[BaseSettings]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command that takes **flags one option per field that is described, None where it is not given; others
    stay in front."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)
        own = [one for one in signature.parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
        prefix = settings.model_config["env_prefix"]
        flags = [_flag(name, field, prefix) for name, field in settings.model_fields.items() if field.description]
        parameters = [*own, *flags]
        command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {one.name: one.annotation for one in parameters}
        return command

    return decorate


def _flag(name: str, field: FieldInfo, prefix: str) -> inspect.Parameter:
    options = [one for one in (field.annotation, *get_args(field.annotation)) if one is not NoneType]
    plain = next((one for one in _PLAIN if one in options), str)
    kind: Any = list[plain] if get_origin(field.annotation) is tuple else plain  # type: ignore[valid-type]
    # the class reads the variable, so that its errors are ours, and typer is not told of it
    text = f"{field.description} ({default_of(field)}; {prefix}{name.upper()})"
    annotation: Any = Annotated[kind | None, typer.Option(help=text)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def default_of(field: FieldInfo) -> str:
    """As help and reference say it."""
    if field.is_required():
        return "required"
    if field.default in (None, "", ()):
        return "default: none"
    shown = str(field.default).lower() if isinstance(field.default, bool) else field.default
    return f"default: {shown:g}" if isinstance(shown, float) else f"default: {shown}"
