"""`provision`'s own flags, parsed elsewhere: for `compare`, and for the command in a plan.yaml."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import typer

from provisioning.cli.errors import USAGE_ERROR


def given_by(command: Any, arguments: Sequence[str]) -> dict[str, Any]:
    """What `command`, the root, is given by these; raises InputError."""
    from provisioning.inputs import InputError

    try:
        with command.make_context("provision", list(arguments)) as context:
            given = dict(context.params)
    except (USAGE_ERROR, typer.Exit) as error:
        raise InputError(" ".join(str(error).split()) or "these flags ask for no plan") from None
    for name in ("slo", "model"):
        if given[name] is None:
            raise InputError(f"--{name}: missing; see provision --help")
    return given
