"""`lora-server serve` with shards on a GPU that is this CPU: python -m tests.support.gpu.gpu_serve serve FLAG..."""

from __future__ import annotations

from lora_server.cli import main
from lora_server.daemon import node

if __name__ == "__main__":
    node.SHARD = "tests.support.gpu.gpu_shard_main"
    main()
