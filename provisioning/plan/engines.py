"""The LLM instances: the split of their memory, and how many GPUs one takes."""

from __future__ import annotations

from lora_server.spec import ModelSpec
from provisioning.inputs import InputError, count, share
from provisioning.model import memory
from provisioning.model.geometry import BaseDtype
from provisioning.model.hardware import GIB, Cluster

MOST_GPUS = 1024
# Instance #GPU of the paper's Table 3.
_INSTANCE_GPUS = {
    "gpt-oss-20b": 1,
    "gpt-oss-20b-paper": 1,
    "qwen3-30b-a3b": 2,
    "mixtral-8x7b": 2,
    "scaled-moe": 4,
    "dbrx": 4,
}


def split_of(text: str) -> float | None:
    """Parse the share of the memory for adapters; None if it is to be searched."""
    if text in ("tuned", "paper"):
        return None if text == "tuned" else 0.5
    try:
        number = float(text)
    except ValueError:
        raise InputError(f"--coupled-split: got {text!r}, expected tuned, paper or a share such as 0.5") from None
    return share(number, "--coupled-split")


def instance_gpus(given: int | None, geometry: ModelSpec, cluster: Cluster, dtype: BaseDtype) -> int:
    """Return the GPUs of an LLM instance: as given, or the paper's, or the fewest that hold the weights."""
    needed = memory.smallest_instance(geometry, cluster, dtype)
    if needed > MOST_GPUS:
        raise InputError(
            f"--gpu-memory-gib: got {cluster.gpu.memory_bytes / GIB:g}, but the weights of {geometry.name} do not fit "
            f"on {MOST_GPUS:,} such GPUs; give more memory"
        )
    if given is None:
        return max(_INSTANCE_GPUS.get(geometry.name, 1), needed)
    return checked_instance_gpus(given, "--instance-gpus", geometry, cluster, dtype)


def checked_instance_gpus(given: int, flag: str, geometry: ModelSpec, cluster: Cluster, dtype: BaseDtype) -> int:
    """Return the given number if the weights fit; raises InputError."""
    gpus = count(given, flag, 1, MOST_GPUS)
    if memory.instance_free_bytes(geometry, cluster, gpus, dtype) <= 0:
        raise InputError(
            f"{flag}: got {gpus}, but the weights of {geometry.name} do not fit; "
            f"give {memory.smallest_instance(geometry, cluster, dtype)} or more"
        )
    return gpus
