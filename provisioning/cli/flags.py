"""Options of the commands, made of the fields that declare them, and parsed out of other command lines."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields
from typing import Annotated, Any, TypeVar, get_args, get_type_hints

import typer

from provisioning.cli.console import USAGE_ERROR
from provisioning.inputs import InputError
from provisioning.plan.flags import PlanFlags

Command = TypeVar("Command", bound=Callable[..., None])
REQUIRED = ("slo", "model", "cache_slots")  # are listed first


def with_flags(flags: type[Any], *, optional: bool = False) -> Callable[[Command], Command]:
    """Give a command an option per field of `flags`, before its own; it gets their values by keyword.

    `optional`: a field without a default is None where its option is missing.
    """
    hints = get_type_hints(flags, include_extras=True)

    def parameter(name: str, default: Any) -> inspect.Parameter:
        kind, text = get_args(hints[name])
        if default is MISSING:
            kind, default = (kind | None, None) if optional else (kind, inspect.Parameter.empty)
        switch = [f"--{name.replace('_', '-')}"] if kind is bool else []
        annotation = Annotated[kind, typer.Option(*switch, help=text)]  # type: ignore[valid-type]
        return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)

    def decorate(command: Command) -> Command:
        own = [
            one for one in inspect.signature(command, eval_str=True).parameters.values() if one.kind != one.VAR_KEYWORD
        ]
        made = [parameter(field.name, field.default) for field in fields(flags)]
        made.sort(key=lambda one: (one.name not in REQUIRED, one.name in REQUIRED and REQUIRED.index(one.name)))
        every = [one for one in own if one.annotation is typer.Context]
        every += [*made, *(one.replace(kind=one.KEYWORD_ONLY) for one in own if one not in every)]
        command.__signature__ = inspect.Signature(every)  # type: ignore[attr-defined]
        command.__annotations__ = {one.name: one.annotation for one in every}
        return command

    return decorate


def given_by(command: Any, arguments: Sequence[str]) -> dict[str, Any]:
    """Parse arguments with `command`, the root; raises InputError."""
    try:
        with command.make_context("provision", list(arguments)) as context:
            return dict(context.params)
    except (USAGE_ERROR, typer.Exit) as error:
        raise InputError(" ".join(str(error).split()) or "these options do not ask for a plan") from None


def plan_flags(given: dict[str, Any]) -> PlanFlags:
    """The planner's options among parsed ones; raises InputError."""
    for name in ("slo", "model"):
        if given[name] is None:
            raise InputError(f"--{name}: missing; see provision --help")
    return PlanFlags(**{field.name: given[field.name] for field in fields(PlanFlags)})
