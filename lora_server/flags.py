"""Command-line flags out of a settings class: its fields, defaults and descriptions are the only list of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from pydantic import BeforeValidator
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings
from typer.core import TyperCommand, TyperOption

_PLAIN = (bool, int, float, Path)  # anything else is parsed by the class, from the text
_METAVARS = {
    "Address": "HOST:PORT",
    "ControllerList": "HOST:PORT",
    "Path": "PATH",
    "Size": "SIZE",
    "SloClasses": "PATH",
    "str": "TEXT",
    "int": "N",
    "float": "X",
}
_ALL = "lora_server.flags.all"  # key of a context: show every flag


def flags_of(
    settings: type[BaseSettings], groups: Mapping[str, Collection[str]]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command that takes **flags one option per field of `groups`; its value is None unless given.

    The command's own parameters stay in front.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)
        own = [one for one in signature.parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
        fields = settings.model_fields
        flags = [_flag(name, fields[name], group) for group, names in groups.items() for name in names]
        parameters = [*own, *flags]
        command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {one.name: one.annotation for one in parameters}
        return command

    return decorate


def _flag(name: str, field: FieldInfo, group: str) -> inspect.Parameter:
    options = [one for one in (field.annotation, *get_args(field.annotation)) if one is not NoneType]
    is_text = any(isinstance(one, BeforeValidator) for one in field.metadata) and get_origin(field.annotation) is None
    plain = str if is_text else next((one for one in _PLAIN if one in options), str)
    kind: Any = list[plain] if get_origin(field.annotation) is tuple else plain  # type: ignore[valid-type]
    text = " ".join(filter(None, (field.description, default_of(field) and f"({default_of(field)})")))
    # the class reads the environment variable, so that its errors are ours; typer is not told of it
    metavar = None if plain is bool else metavar_of(field)
    annotation: Any = Annotated[kind | None, typer.Option(help=text, metavar=metavar, rich_help_panel=group)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def default_of(field: FieldInfo) -> str:
    """Say the default as help and reference do; empty where the description says it."""
    if field.is_required():
        return "required"
    if field.default in (None, "", ()):
        return "" if "Default: " in (field.description or "") else "default: none"
    shown = str(field.default).lower() if isinstance(field.default, bool) else field.default
    return f"default: {shown:g}" if isinstance(shown, float) else f"default: {shown}"


def metavar_of(field: FieldInfo) -> str:
    """Say what a value looks like: its choices, or its kind."""
    if get_origin(field.annotation) is Literal:
        return "|".join(get_args(field.annotation))
    return _METAVARS[next(_types_in(field.annotation)).__name__]


def _types_in(annotation: Any) -> Iterator[type]:
    for one in (annotation,) if isinstance(annotation, type) else get_args(annotation):
        if isinstance(one, type) and one is not NoneType:
            yield one
        elif get_args(one):
            yield from _types_in(one)


class GroupedCommand(TyperCommand):
    """A command with flags grouped by `rich_help_panel` in its --help; of groups, only `essential` flags are shown.

    The help is plain text: Typer's own panels cut long flags at 80 columns.
    """

    essential: Collection[str] = ()

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write a section per group; flags without a group come last."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for option in self.get_params(ctx):
            group = getattr(option, "rich_help_panel", None) or ""
            if group and not ctx.meta.get(_ALL) and option.name not in self.essential:
                continue
            groups.setdefault(group, []).append(_help_record(option, ctx))
        for group, records in sorted(groups.items(), key=lambda item: item[0] == ""):
            with formatter.section(group or "Options"):
                formatter.write_dl(records)


def _help_record(option: Any, ctx: Any) -> tuple[str, str]:
    left, text = option.get_help_record(ctx)
    if isinstance(option, TyperOption) and option.metavar:
        left = f"{option.opts[0]} {option.metavar}"
    return left.partition(" / --no-")[0], text


def show_all_flags(context: typer.Context, asked: bool) -> None:
    """Callback of --help-all: print the help of a GroupedCommand with every flag, and exit."""
    if asked:
        context.meta[_ALL] = True
        typer.echo(context.get_help())
        raise typer.Exit
