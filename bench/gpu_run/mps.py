"""CUDA's Multi-Process Service for one stage: its processes share the GPU, instead of taking turns on it."""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from lora_server.demo import children

CONTROL = "nvidia-cuda-mps-control"
SUFFIX = "-mps"  # of the name under which results are kept: times differ under MPS
START_SECONDS, ASK_SECONDS, STOP_SECONDS = 10.0, 2.0, 5.0


@contextlib.contextmanager
def running(environment: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Yield the environment of processes that use a service of their own, which ends with the block.

    Raises OSError where there is no such service, or it does not answer.
    """
    with tempfile.TemporaryDirectory(prefix="lora-mps-") as folder:
        places = {"CUDA_MPS_PIPE_DIRECTORY": Path(folder, "pipe"), "CUDA_MPS_LOG_DIRECTORY": Path(folder, "log")}
        for place in places.values():
            place.mkdir()
        own = {**environment, **{name: str(place) for name, place in places.items()}}
        daemon = children.start([CONTROL, "-f"], env=own, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        try:
            deadline = time.monotonic() + START_SECONDS
            while not _send(own, "get_server_list"):
                if daemon.poll() is not None or time.monotonic() > deadline:
                    raise OSError(f"{CONTROL} -f does not answer; is CUDA's MPS installed, and no other one running?")
                time.sleep(0.1)
            yield own
            _send(own, "quit -t 1")
        finally:
            children.stop(daemon, STOP_SECONDS)


def _send(environment: Mapping[str, str], command: str) -> bool:
    """Send a command to the service; return whether it was taken within ASK_SECONDS."""
    try:
        done = subprocess.run(
            [CONTROL], input=f"{command}\n", text=True, env=environment, timeout=ASK_SECONDS, capture_output=True
        )
    except (subprocess.TimeoutExpired, FileNotFoundError):
        return False
    return done.returncode == 0
