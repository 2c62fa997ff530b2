"""Checks of this machine, each with a cure."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lora_server.cli.call import DEFAULT_SERVER, EXIT_ERROR, JsonOption, ServerOption, one_line_errors, print_json
from lora_server.config import ServeConfig, load

if TYPE_CHECKING:
    from lora_server.doctor import Finding, NodeResources

COLUMNS = ("state", "check", "found")
NO_MODEL = "none"  # a configuration needs one, and no check does


@one_line_errors()
def doctor(
    config: Annotated[
        Path | None, typer.Option(help="Also run the checks of a start with this YAML file. (default: none)")
    ] = None,
    cluster: Annotated[
        bool, typer.Option("--cluster", help="Check what an engine on this machine would meet at --server, instead.")
    ] = False,
    server: ServerOption = DEFAULT_SERVER,
    as_json: JsonOption = False,
) -> None:
    """Check this machine, with a cure for each problem.

    With --cluster it joins a running server as an engine does: are all ports reachable, do versions and clocks agree,
    and how fast are steps to every shard from here?
    """
    from lora_server import logs
    from lora_server.doctor import Outcome

    logs.configure()  # to stderr: stdout is for the findings
    findings = _of_cluster(server) if cluster else _of_machine(config)
    if as_json:
        print_json([vars(finding) for finding in findings])
    else:
        _show(findings)
    if any(finding.state is Outcome.FAILED for finding in findings):
        raise typer.Exit(EXIT_ERROR)


def _of_machine(config: Path | None) -> list[Finding]:
    from lora_server.doctor import Machine, diagnose

    settings = load({}, config) if config is not None else load({"base_model": NO_MODEL})
    return diagnose(Machine(), _resources(settings), _starts(settings) if config is not None else {})


def _of_cluster(server: str) -> list[Finding]:
    from lora_server.demo.cluster_check import check

    return list(check(server))


def _starts(settings: ServeConfig) -> dict[str, Callable[[], str]]:
    from lora_server.daemon.checks import checks, later_checks

    return checks(settings) | later_checks(settings)


def _resources(settings: ServeConfig) -> NodeResources:
    from lora_server.doctor import NodeResources

    listens = [("--http", settings.http)]
    if not settings.node_rank:
        listens.insert(0, ("--listen", settings.listen))
    named = {"--data-dir": settings.data_dir, "--disk-cache": settings.disk_cache}
    return NodeResources(listens, [(flag, path) for flag, path in named.items() if path is not None])


def _show(findings: list[Finding]) -> None:
    from lora_server import terminal
    from lora_server.doctor import Outcome

    console = terminal.open_console()
    terminal.table(
        console, COLUMNS, [(one.state, one.check, one.found) for one in findings], left=COLUMNS, wrapped="found"
    )
    wrong = [one for one in findings if one.state is not Outcome.OK]
    if wrong:
        console.print()
    for one in sorted(wrong, key=lambda one: one.state is not Outcome.FAILED):
        terminal.say(console, f"{one.check}: {one.cure}", one.state)
