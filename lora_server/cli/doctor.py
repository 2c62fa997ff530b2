"""What of this machine would keep a node from serving well, and what to do about it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lora_server.cli.call import EXIT_ERROR, JsonOption, print_json, run
from lora_server.config import load

if TYPE_CHECKING:
    from lora_server.doctor import Finding, Places

COLUMNS = {"state": "<", "check": "<", "found": "<"}
NO_MODEL = "none"  # a configuration needs one, and no check does


def doctor(
    config: Annotated[
        Path | None, typer.Option(help="YAML file that a node would be started with. (default: none)")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """What this machine lacks for a node, and what to do about it."""

    def command() -> None:
        from lora_server.doctor import Machine, State, diagnose

        findings = diagnose(Machine(), _places(config))
        if as_json:
            print_json([vars(finding) for finding in findings])
        else:
            _show(findings)
        if any(finding.state is State.FAILED for finding in findings):
            raise typer.Exit(EXIT_ERROR)

    run(command)


def _places(file: Path | None) -> Places:
    from lora_server.doctor import Places

    settings = load({}, file) if file is not None else load({"base_model": NO_MODEL})
    listens = [("--http", settings.http)]
    if not settings.node_rank:
        listens.insert(0, ("--listen", settings.listen))
    named = {"--data-dir": settings.data_dir, "--disk-cache": settings.disk_cache}
    return Places(listens, [(flag, path) for flag, path in named.items() if path is not None])


def _show(findings: list[Finding]) -> None:
    from lora_server import terminal
    from lora_server.doctor import State

    console = terminal.open_console()
    terminal.table(console, COLUMNS, [(one.state, one.check, one.found) for one in findings], "found")
    wrong = [one for one in findings if one.state is not State.OK]
    if wrong:
        console.print()
    for one in sorted(wrong, key=lambda one: one.state is not State.FAILED):
        terminal.say(console, f"{one.check}: {one.cure}", one.state)
