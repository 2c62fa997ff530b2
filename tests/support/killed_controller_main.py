"""A controller's process that is killed in an update, by itself; see tests.support.killed_serve."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from lora_server.config import ProcessConfig
from lora_server.daemon.child_main import run_child
from lora_server.daemon.controller_main import ControllerProcess
from tests.support.stages import STAGES

ORDER = "die"  # a file in --data-dir: the stage, and whether it is done yet


def order(method: str, after: bool) -> str:
    return f"{method} {'done' if after else 'begun'}"


class DyingController(ControllerProcess):
    def __init__(self, config: ProcessConfig) -> None:
        super().__init__(config)
        assert config.data_dir is not None
        self._order = config.data_dir / ORDER
        self._begun: list[str] = []
        methods = list(dict.fromkeys(method for method, _, _ in STAGES))
        for index, method in enumerate(methods):
            self._wrap(method, set(methods[:index]))

    def _wrap(self, method: str, earlier: set[str]) -> None:
        """A call counts behind those of the earlier stages: others than an update have some of these, too."""
        original = getattr(self.controller.adapters, method)

        def wrapped(*arguments: object, **named: object) -> object:
            counts = earlier.issubset(self._begun)
            self._begun.append(method)
            if counts:
                die(self._order, order(method, after=False))
            result = original(*arguments, **named)
            if counts:
                die(self._order, order(method, after=True))
            return result

        setattr(self.controller.adapters, method, wrapped)


def die(file: Path, here: str) -> None:
    """Once."""
    if file.exists() and file.read_text() == here:
        file.unlink()
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    run_child(DyingController)
