"""The `lora-server` command, and its sub-commands that need no running server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from lora_server import __version__, installed
from lora_server.cli.adapters import app as adapters_app
from lora_server.cli.audit import audit
from lora_server.cli.call import EXIT_ERROR, JsonOption, one_line_errors
from lora_server.cli.doctor import doctor
from lora_server.cli.drain import drain
from lora_server.cli.events import events
from lora_server.cli.merge import merge
from lora_server.cli.profile import profile
from lora_server.cli.profile_vllm import profile_vllm
from lora_server.cli.resize import resize
from lora_server.cli.status import status
from lora_server.cli.tenants import app as tenants_app
from lora_server.cli.tokens import app as tokens_app
from lora_server.config import ServeConfig, load
from lora_server.config.groups import ESSENTIAL, GROUPS
from lora_server.flags import GroupedCommand, flags_of, show_all_flags

HELP = {"help_option_names": ["-h", "--help"]}  # of all sub-commands too

# without rich, help is as wide as the terminal lets it be, and cuts no flag
app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False, context_settings=HELP)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"lora-server {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Serve LoRA adapters from shards of their own, to engines that stay LoRA-free."""


class ServeCommand(GroupedCommand):
    """`serve`, with the help of a few flags and the help of all."""

    essential = ESSENTIAL


@app.command(cls=ServeCommand)
@flags_of(ServeConfig, GROUPS)
@one_line_errors()
def serve(
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="YAML file with any of these settings. (default: none)")
    ] = None,
    help_all: Annotated[
        bool, typer.Option("--help-all", callback=show_all_flags, is_eager=True, help="Show every flag and exit.")
    ] = False,
    **flags: Any,
) -> None:
    """Run one node of a LoRA server until Ctrl-C or SIGTERM.

    \b
    lora-server serve --base-model ./Mixtral-8x7B --adapters ./adapters \\
        --layout ep2-pp2

    Every setting is a flag (--device-pool), an environment variable (LORA_SERVER_DEVICE_POOL) and a key of the
    --config file (device-pool). A flag overrides the variable, which overrides the file.
    """
    from lora_server import logs
    from lora_server.daemon.forks import limit_threads

    settings = load({name: value for name, value in flags.items() if value is not None}, config)
    logs.configure(form=settings.log_format)
    limit_threads(settings.threads)
    if settings.launcher == "ray":
        installed.require("ray")
        from lora_server.daemon.on_ray import serve_on_ray as serve_server
    else:
        from lora_server.daemon.node import serve as serve_server
    serve_server(settings)


app.add_typer(adapters_app, name="adapters")
app.add_typer(tokens_app, name="tokens")
app.add_typer(tenants_app, name="tenants")
app.command()(audit)
app.command()(status)
app.command()(doctor)
app.command()(drain)
app.command()(events)
app.command()(merge)
app.command()(profile)
app.command()(profile_vllm)
app.command()(resize)


@app.command()
@one_line_errors()
def demo(
    model: Annotated[
        Path | None, typer.Option(help="Model directory (default: a small Mixtral, trained in seconds).")
    ] = None,
    adapters: Annotated[
        Path | None, typer.Option(help="Directory of adapters (default: 16 of mixed ranks; three answer in styles).")
    ] = None,
    layout: Annotated[str, typer.Option(help="Layout of the main check.")] = "ep2-pp2",
    timing: Annotated[bool, typer.Option("--timing", help="Time four layouts, too (a minute more).")] = False,
    as_json: JsonOption = False,
) -> None:
    """Compare a sharded server with PEFT, token by token."""
    installed.require("demo")
    from lora_server.demo.run import run_demo

    if not run_demo(model, adapters, layout, timing, as_json):
        raise typer.Exit(EXIT_ERROR)


def main() -> None:
    """Console script."""
    app()
