"""The plan that a plan.yaml holds: its layout, and the question by the command that it was made with."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_server.errors import ConfigError
from lora_server.placement import Layout
from provisioning.inputs import InputError, text_of
from provisioning.plan.candidates import Candidate, evaluate
from provisioning.plan.flags import PlanFlags
from provisioning.plan.instances import sized
from provisioning.plan.scenario import scenario
from provisioning.report.serve_file import COMMAND
from provisioning.watch.measured import ServerBuild


@dataclass(frozen=True, eq=False, kw_only=True)
class Planned:
    """A plan read from a file. `candidate` is the plan at the load that it was made for."""

    candidate: Candidate
    command: str
    file: Path

    def check_model(self, server: ServerBuild) -> None:
        """Refuse a server of another model; raises InputError. A server that does not say its geometry passes."""
        spec = self.candidate.scenario.model.spec
        if server.geometry and server.geometry != spec.geometry:
            raise InputError(
                f"--plan: {self.file} is of {spec.name} ({spec.geometry}), but the server serves {server.model} "
                f"({server.geometry}); give the plan of this server's model"
            )

    def check_replicas(self, server: ServerBuild) -> None:
        """Refuse a server with another number of replicas; raises InputError. One that does not say it has one."""
        planned = self.candidate.scenario.replicas
        if (server.replicas or "1") != str(planned):
            raise InputError(
                f"--plan: {self.file} is for --replicas {planned}, but the server has {server.replicas or 1}: its GPUs "
                "would be counted wrong; plan with the server's --replicas"
            )


def read(file: Path, flags_of: Callable[[Sequence[str]], PlanFlags]) -> Planned:
    """Read a plan.yaml; `flags_of` parses a command's arguments. Raises InputError that begins with --plan."""
    where = f"--plan: {file}"
    text = text_of(file, where)
    command = next(
        (line[2:].removeprefix(COMMAND) for line in text.splitlines() if line.startswith(f"# {COMMAND}")), ""
    )
    if not command:
        raise InputError(f"{where} names no `provision` command; write it again with `provision ... --out`")
    try:
        question = sized(scenario(flags_of(shlex.split(command)[1:])))
        layout = Layout.parse(str(_settings(text, where).get("layout")))
    except (ConfigError, ValueError) as error:
        raise InputError(f"{where}: its command or layout cannot be used here: {error}") from None
    return Planned(candidate=evaluate(question, layout), command=command, file=file)


def _settings(text: str, where: str) -> dict[str, Any]:
    import yaml

    try:
        found = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise InputError(f"{where} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(found, dict):
        raise InputError(f"{where}: got {type(found).__name__}, expected what `provision --out` writes")
    return found
