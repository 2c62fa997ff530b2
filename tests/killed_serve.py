"""`lora-server serve` whose controller kills itself where a test says: python -m tests.killed_serve serve FLAG..."""

from __future__ import annotations

import functools

from lora_server.cli import main
from lora_server.daemon import node, processes, spare

CONTROLLERS = {"lora_server.daemon.controller_main": "tests.killed_controller_main"}


def replaced(module: str, threads: int) -> spare.Spare:
    return spare.Spare(CONTROLLERS.get(module, module), threads)


if __name__ == "__main__":
    node.Spare = functools.partial(replaced)  # type: ignore[misc, assignment]
    processes.SPARE_SECONDS = 0.0  # so that its successor comes soon
    main()
