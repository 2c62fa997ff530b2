"""What a typed `lora-server serve` command is, parsed by the real command."""

import typer

from lora_server.cli import app


def flags_of(words):
    """Settings by name from `serve --flag ...`, as `lora_server.config.load` takes them; a wrong flag raises."""
    assert words[0] == "serve"
    command = typer.main.get_command(app).commands["serve"]
    parsed = command.make_context("serve", list(words[1:])).params
    return {name: value for name, value in parsed.items() if value is not None and name not in ("config", "help_all")}
