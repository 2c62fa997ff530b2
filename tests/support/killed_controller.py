"""`lora-server serve`, run by `python -m`, with a controller (`main()`) that kills itself where a test says."""

import operator
import os
import signal
from pathlib import Path

from lora_server.config import ProcessConfig
from lora_server.daemon.child_main import run_child
from lora_server.daemon.controller_main import ControllerProcess

ORDER = "die"  # a file in --data-dir: the stage, and whether it is done yet
STAGES = [  # methods of parts of the controller's adapters, in the order of an update
    # what is the last to be begun, or done; whether the new version serves then
    ("changes.numbered", False, False),  # it was read
    ("changes.load_beside", False, False),
    ("changes.load_beside", True, False),  # shards load it
    ("catalog.ledger.added", False, False),  # shards have it
    ("catalog.ledger.added", True, True),  # and it is kept
    ("changes.accept", False, True),  # and it is listed
    ("admission.collect", False, True),  # and shards were told
]


def part_of(adapters: object, method: str) -> tuple[object, str]:
    """The object that has a method, and the method's name there."""
    path, _, name = method.rpartition(".")
    return operator.attrgetter(path)(adapters), name


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
        """Let a call count behind those of the earlier stages: not only updates have some of these."""
        part, name = part_of(self.controller.adapters, method)
        original = getattr(part, name)

        def wrapped(*arguments: object, **named: object) -> object:
            counts = earlier.issubset(self._begun)
            self._begun.append(method)
            if counts:
                die(self._order, order(method, after=False))
            result = original(*arguments, **named)
            if counts:
                die(self._order, order(method, after=True))
            return result

        setattr(part, name, wrapped)


def die(file: Path, here: str) -> None:
    """End this process by SIGKILL, once, where the order says `here`."""
    if file.exists() and file.read_text() == here:
        file.unlink()
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    run_child(DyingController)


if __name__ == "__main__":
    from lora_server.cli import main as serve
    from lora_server.daemon import node

    node.CONTROLLER = "tests.support.killed_controller"
    serve()
