"""The outcomes of stages, one JSON file each, so that a run that was cut continues where it was."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).parent.parent.parent
SOURCES = ("bench", "client_connector", "kernels_cuda", "lora_server")
SUFFIXES = (".py", ".cu", ".cuh", ".h")

Ending = Literal["passed", "failed", "unable", "cut"]


@dataclass(frozen=True)
class Outcome:
    """The end of a stage.

    passed   it ran, and what it looked at is as it should be    failed   it is not, or the stage broke; see `reason`
    unable   it cannot run here: `reason` says what is missing   cut      at its deadline, or with the whole run
    """

    stage: str
    ending: Ending
    reason: str
    seconds: float
    began: str  # UTC, ISO 8601
    command: str
    code: str  # of the sources it ran with
    lines: list[dict[str, Any]] = field(default_factory=list)
    log: str = ""  # its end


class Results:
    """The outcomes in a folder, and the files that stages write beside them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def record(self, stage: str) -> Path:
        """Return the path of a stage's findings, which it writes line by line while it runs."""
        return self.folder / f"{stage}.jsonl"

    def log(self, stage: str) -> Path:
        """Return the path of a stage's output."""
        return self.folder / f"{stage}.log"

    def save(self, outcome: Outcome) -> None:
        """Whole or not at all."""
        path = self.folder / f"{outcome.stage}.json"
        draft = path.with_suffix(".draft")
        draft.write_text(json.dumps(asdict(outcome), indent=1) + "\n")
        os.replace(draft, path)  # noqa: PTH105

    def load(self, stage: str) -> Outcome | None:
        """None for a stage that never ended; one that is running, or was killed with the run, has not."""
        try:
            return Outcome(**json.loads((self.folder / f"{stage}.json").read_text()))
        except FileNotFoundError:
            return None

    def ended(self, stage: str) -> bool:
        """Whether it has had its say: one that was cut, or could not run (which takes no time), begins again."""
        outcome = self.load(stage)
        return outcome is not None and outcome.ending in ("passed", "failed")

    def forget(self, stage: str) -> None:
        """Delete a stage's files, as if it had never run."""
        for path in (self.folder / f"{stage}.json", self.record(stage), self.log(stage)):
            path.unlink(missing_ok=True)


def code_digest() -> str:
    """Compute a digest of the sources that stages run, so that results of different code are not confused."""
    digest = hashlib.sha256()
    for package in SOURCES:
        for path in sorted((ROOT / package).rglob("*")):
            if path.suffix in SUFFIXES and "out" not in path.relative_to(ROOT).parts:
                digest.update(path.read_bytes())
    return digest.hexdigest()[:12]
