"""The moments of an engine's run, by the calls of its model's modules, and a process that is killed at one of them."""

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

from torch.nn.modules.module import register_module_forward_pre_hook


class ModuleCalls:
    """Counts the calls of this process's modules from `begin` on, and kills a process after one of them."""

    def __init__(self) -> None:
        self._hook: Any = None
        self.number = 0

    def begin(self, do: Callable[[], object] | None = None, at: int = 0) -> None:
        """`do` is called once, at the call of that number."""
        self.end()

        def called(*ignored: object) -> None:
            if self.number == at and do is not None:
                do()
            self.number += 1

        self._hook, self.number = register_module_forward_pre_hook(called), 0

    def end(self) -> int:
        """How many there were."""
        if self._hook is not None:
            self._hook.remove()
        self._hook = None
        return self.number


def kill_in(pid: int, seconds: float) -> None:
    """From a thread of its own, while a step goes on."""

    def kill() -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            pass
        os.kill(pid, signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()
