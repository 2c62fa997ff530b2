"""What a process of kernels that wait for others needs in its environment."""

from __future__ import annotations

import os

import structlog
import torch

ENVIRONMENT = {  # what CUDA reads at a process's first call, and never again
    "CUDA_MODULE_LOADING": "EAGER",  # a kernel that is loaded later waits for one that serves, or waits
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",  # streams that share a connection wait for each other; by itself CUDA has 8
}
log = structlog.get_logger()


def prepare_environment() -> None:
    """For kernels that wait, in this process: before its first call of CUDA. What the user set stays, and where it is
    too late the log says so."""
    lacking = [name for name in ENVIRONMENT if name not in os.environ]
    if lacking and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        wanted = " ".join(f"{name}={ENVIRONMENT[name]}" for name in lacking)
        log.warning("CUDA was in use before; start the process with what it lacks, or calls may wait", lacking=wanted)
    for name in lacking:
        os.environ[name] = ENVIRONMENT[name]
