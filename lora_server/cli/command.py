"""What the `lora-server` command is made of, and the sub-commands that need no running server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from lora_server import __version__
from lora_server.cli.adapters import app as adapters_app
from lora_server.cli.audit import audit
from lora_server.cli.call import EXIT_ERROR, JsonOption, run
from lora_server.cli.doctor import doctor
from lora_server.cli.drain import drain
from lora_server.cli.sharing import add_to as add_sharing
from lora_server.cli.status import status
from lora_server.cli.tenants import app as tenants_app
from lora_server.cli.tokens import app as tokens_app
from lora_server.config import ServeConfig, load
from lora_server.errors import LoraServerError
from lora_server.flags import flags_of

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
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Say it, and exit.")
    ] = False,
) -> None:
    """LoRA adapters on their own shards, for engines that stay LoRA-free."""


@app.command()
@flags_of(ServeConfig)
def serve(
    config: Annotated[
        Path | None, typer.Option(help="YAML file with any of these; flags and env win. (default: none)")
    ] = None,
    **flags: Any,
) -> None:
    """Run one node of a LoRA server until Ctrl-C or SIGTERM."""

    def command() -> None:
        from lora_server import logs
        from lora_server.daemon.forks import limit_threads

        settings = load({name: value for name, value in flags.items() if value is not None}, config)
        logs.configure(form=settings.log_format)
        limit_threads(settings.threads)
        from lora_server.daemon.node import serve as serve_node

        failure = serve_node(settings)
        if failure:
            raise LoraServerError(failure)

    run(command)


app.add_typer(adapters_app, name="adapters")
add_sharing(adapters_app)
app.add_typer(tokens_app, name="tokens")
app.add_typer(tenants_app, name="tenants")
app.command()(audit)
app.command()(status)
app.command()(doctor)
app.command()(drain)


@app.command()
def demo(
    model: Annotated[
        Path | None, typer.Option(help="Your own model directory (default: a small random Mixtral).")
    ] = None,
    adapters: Annotated[
        Path | None, typer.Option(help="Your own adapters (default: 16 random ones of mixed ranks).")
    ] = None,
    layout: Annotated[str, typer.Option(help="Layout of the main check.")] = "ep2-pp2",
    as_json: JsonOption = False,
) -> None:
    """Sharded server, two engines, 16 adapters, checked against PEFT."""

    def command() -> None:
        from lora_server import installed

        installed.require("demo")
        from lora_server.demo.run import run_demo

        if not run_demo(model, adapters, layout, as_json):
            raise typer.Exit(EXIT_ERROR)

    run(command)


def main() -> None:
    """Console script."""
    app()
