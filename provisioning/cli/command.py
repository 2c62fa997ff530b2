"""The `provision` command: what its subcommands are, and how it ends on a usage error."""

from __future__ import annotations

import sys

import typer

from provisioning.cli.compare import compare
from provisioning.cli.console import BAD_INPUT, USAGE_ERROR
from provisioning.cli.plan import plan
from provisioning.cli.references import glossary, models, table4
from provisioning.cli.simulate import simulate
from provisioning.cli.watch import watch

HELP = {"help_option_names": ["-h", "--help"]}  # of all sub-commands too

app = typer.Typer(add_completion=False, help="Plan the GPUs of a LoRA server.", context_settings=HELP)
app.callback(invoke_without_command=True)(plan)
app.command("compare", context_settings={"ignore_unknown_options": True, "allow_extra_args": True})(compare)
app.command("glossary")(glossary)
app.command("models")(models)
app.command("simulate")(simulate)
app.command("table4")(table4)
app.command("watch")(watch)


def main() -> None:
    """Console script: usage errors, too, are one line that names the flag."""
    try:
        code = app(standalone_mode=False)
    except USAGE_ERROR as error:
        typer.echo(f"error: {' '.join(error.format_message().split())}", err=True)
        sys.exit(BAD_INPUT)
    except typer.Abort:
        sys.exit(130)
    sys.exit(code if isinstance(code, int) else 0)
