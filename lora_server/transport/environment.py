"""CUDA's environment variables for processes with kernels that wait for memory to change."""

from __future__ import annotations

import os

import structlog
import torch

LOADING = "CUDA_MODULE_LOADING"
ENVIRONMENT = {  # CUDA reads these once, at a process's first call
    LOADING: "EAGER",  # loading a kernel later may wait for a running one, and ours may never end
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",  # streams that share a connection wait for each other; CUDA's default is 8
}
log = structlog.get_logger()


def prepare_environment() -> None:
    """Set them before this process's first call of CUDA; warn if torch has made that already.

    The user's number of connections stays; modules are loaded eagerly whatever the user set.
    """
    lacking = [name for name in ENVIRONMENT if name not in os.environ]
    if os.environ.get(LOADING, ENVIRONMENT[LOADING]) != ENVIRONMENT[LOADING]:
        lacking.append(LOADING)
    if lacking and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        wanted = " ".join(f"{name}={ENVIRONMENT[name]}" for name in lacking)
        log.warning("CUDA is initialised already; set these before the start, or its calls may hang", lacking=wanted)
    for name in lacking:
        os.environ[name] = ENVIRONMENT[name]
