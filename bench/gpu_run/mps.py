"""CUDA's Multi-Process Service for one run: processes share the GPU at the same time, instead of taking turns on it."""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from lora_server.demo import children

CONTROL = "nvidia-cuda-mps-control"
SUFFIX = "-mps"  # of the name under which results are kept: their times are others
SECONDS = 20.0


@contextlib.contextmanager
def running(environment: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Yield the environment in which processes use a service of this run's own, which ends with it. Raises OSError
    where there is none, or it does not answer."""
    with tempfile.TemporaryDirectory(prefix="lora-mps-") as folder:
        places = {"CUDA_MPS_PIPE_DIRECTORY": Path(folder, "pipe"), "CUDA_MPS_LOG_DIRECTORY": Path(folder, "log")}
        for place in places.values():
            place.mkdir()
        own = {**environment, **{name: str(place) for name, place in places.items()}}
        daemon = children.start([CONTROL, "-f"], env=own, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        try:
            deadline = time.monotonic() + SECONDS
            while not _told(own, "get_server_list"):
                if daemon.poll() is not None or time.monotonic() > deadline:
                    raise OSError(f"{CONTROL} -f: it does not answer; is another one running?")
                time.sleep(0.1)
            yield own
            _told(own, "quit")
        finally:
            children.stop(daemon, SECONDS)


def _told(environment: Mapping[str, str], command: str) -> bool:
    """Whether the service took a command."""
    done = subprocess.run(
        [CONTROL], input=f"{command}\n", text=True, env=environment, timeout=SECONDS, capture_output=True
    )
    return done.returncode == 0
