"""AMX on CPUs: Linux kills a process (SIGILL) that uses its tile registers without having asked for them.

vLLM picks AMX attention for bfloat16 where the processor has it, and asks for nothing; only torch.compile does,
so that with `--enforce-eager` the first request ends the worker.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from lora_server.errors import ConfigError


def ask_for_amx(
    dtype: torch.dtype,
    has_amx: Callable[[], bool] = torch.cpu._is_amx_tile_supported,  # what vLLM asks before it picks AMX
    ask: Callable[[], bool] = torch.cpu._init_amx,  # arch_prctl(ARCH_REQ_XCOMP_PERM, XTILEDATA)
) -> None:
    """Request AMX for all threads of this process. Raises ConfigError if vLLM would use AMX and may not."""
    if has_amx() and not ask() and dtype is not torch.float32:
        raise ConfigError(
            f"dtype: got {str(dtype).removeprefix('torch.')}, for which vLLM uses this processor's AMX registers, and "
            "the kernel does not let this process have them (Linux before 5.16, or a sandbox): start it with "
            "--dtype float32"
        )
