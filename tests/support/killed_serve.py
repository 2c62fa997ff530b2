"""`lora-server serve` whose controller kills itself where a test says."""

from __future__ import annotations

from lora_server.cli import main
from lora_server.daemon import node

if __name__ == "__main__":
    node.CONTROLLER = "tests.support.killed_controller_main"
    main()
