"""`lora-server serve` whose shards have a GPU that is this CPU: python -m tests.gpu_serve serve FLAG..."""

from __future__ import annotations

import functools

from lora_server.cli import main
from lora_server.daemon import node, spare

SHARDS = {"lora_server.daemon.shard_main": "tests.gpu_shard_main"}


def emulated(module: str, threads: int) -> spare.Spare:
    return spare.Spare(SHARDS.get(module, module), threads)


if __name__ == "__main__":
    node.Spare = functools.partial(emulated)  # type: ignore[misc, assignment]
    main()
