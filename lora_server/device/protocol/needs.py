"""The requirements of a machine for steps that no host touches, and the cure for each that it lacks.

`check` asks the machine; the rules are functions of its answers, so that they can be tried anywhere.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from lora_server.errors import ConfigError

NVSHMEM = "nvidia-nvshmem-cu13"
LEAST_DRIVER = 12040  # as the driver counts: CUDA 12.4
MODULES = {  # to the cure
    "cupy": "pip install '.[cuda]' in a checkout of lora-server",
    "cuda.bindings": "pip install '.[cuda]' in a checkout of lora-server",
    "cuda.bindings.nvrtc": "install nvidia-cuda-nvrtc of the driver's CUDA, which torch for CUDA brings",
}
FEATURES = {  # the driver's attribute of a device, to the cure
    "VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED": "update the driver; a vGPU may not offer it",
    "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED": "run on Linux, outside WSL",
    # not ..._V1: that is an older API, which drivers have switched off by default
    "CAN_USE_64_BIT_STREAM_MEM_OPS": "update the driver to 535 or later",
}


@dataclass(frozen=True)
class Answers:
    """Answers of a machine. `driver` is 0 if none answers; `failed` has the modules that do not load, and why."""

    driver: int
    failed: Mapping[str, str]
    lacking: frozenset[str] = frozenset()  # of FEATURES


def missing(answers: Answers) -> list[str]:
    """List what transport `gpu` lacks: a line each, with its cure."""
    found = [f"{name}: {why}; {MODULES[name]}" for name, why in answers.failed.items()]
    if "cuda.bindings" in answers.failed:  # no answer is possible
        return found
    if not answers.driver:
        return [*found, "no NVIDIA driver answers; install one, or give the container the GPU (--gpus all)"]
    if answers.driver < LEAST_DRIVER:
        found.append(
            f"driver: got CUDA {_version(answers.driver)}, expected {_version(LEAST_DRIVER)} or later; update it"
        )
    return found + [
        f"{name.lower()}: the GPU or its driver does not have it; {FEATURES[name]}"
        for name in FEATURES
        if name in answers.lacking
    ]


def ask(index: int) -> Answers:
    """Ask this machine about one of its GPUs."""
    failed = {}
    for name in MODULES:
        try:
            importlib.import_module(name)
        except Exception as error:  # a broken installation fails in many ways
            failed[name] = f"{type(error).__name__}: {error}"
    if "cuda.bindings" in failed:
        return Answers(0, failed)
    from lora_server.device.protocol.virtual_memory import DriverError, call, driver

    try:
        call("cuInit", 0)
        version = int(call("cuDriverGetVersion"))
        attributes = driver().CUdevice_attribute
        lacking = [
            name
            for name in FEATURES
            if not call("cuDeviceGetAttribute", getattr(attributes, f"CU_DEVICE_ATTRIBUTE_{name}"), index)
        ]
    except (DriverError, RuntimeError):
        return Answers(0, failed)
    return Answers(version, failed, frozenset(lacking))


def has_dma_buf(index: int) -> bool:
    """Tell whether the driver hands a GPU's memory to a network card without nvidia_peermem."""
    from lora_server.device.protocol.virtual_memory import call, driver

    attribute = driver().CUdevice_attribute.CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED
    return bool(call("cuDeviceGetAttribute", attribute, index))


def check(device: torch.device) -> None:
    """Raise a ConfigError that names all that is missing, if anything is."""
    lacks = missing(ask(device.index or 0))
    if lacks:
        raise ConfigError("transport gpu: " + "; and ".join(lacks) + "; cuda_ipc and shm work without")


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


# -- beyond a node


def host_library() -> str:
    """Load NVSHMEM's host library, for nvshmem4py too; return its path. Raises what cuda.pathfinder does."""
    from cuda.pathfinder import load_nvidia_dynamic_lib

    path = load_nvidia_dynamic_lib("nvshmem_host").abs_path
    if path is None:
        raise OSError("libnvshmem_host: it was found, and cannot be named")
    return str(path)


def missing_for_nvshmem(host_library: Callable[[], str], not_built: Callable[[], str]) -> list[str]:
    """List what NVSHMEM's world lacks on a host. `host_library` loads it; `not_built` says why nothing links."""
    try:
        library = Path(host_library())
        importlib.import_module("nvshmem.bindings")
    except Exception as error:  # a broken installation fails in many ways
        return [f"nvshmem: {type(error).__name__}: {error}; pip install '.[cuda]' in a checkout of lora-server"]
    found = []
    if not list(library.parent.glob("nvshmem_bootstrap_uid.so*")):
        found.append(f"nvshmem_bootstrap_uid: not beside {library.name}; install {NVSHMEM}, the whole of it")
    if why := not_built():
        found.append(
            f"device code: {why}; install {NVSHMEM}, nvidia-cuda-nvrtc, nvidia-nvjitlink, nvidia-cuda-runtime and "
            "nvidia-cuda-cccl of CUDA 13"
        )
    return found


def missing_for_network(root: Path = Path("/"), dma_buf: bool = False) -> list[str]:
    """List what NVSHMEM's IBGDA lacks on a host with /proc and /sys below `root`; `dma_buf`: the driver has it."""
    found = []
    if not list(root.glob("sys/class/infiniband/mlx5_*")):
        found.append("no mlx5 network card; expected a ConnectX with its driver loaded")
    if not list(root.glob("dev/infiniband/uverbs*")):
        found.append(
            "no /dev/infiniband/uverbs*; modprobe ib_uverbs, and give a container --device /dev/infiniband and "
            "--ulimit memlock=-1"
        )
    modules = _text(root / "proc/modules")
    if not dma_buf and not any(line.startswith("nvidia_peermem ") for line in modules.splitlines()):
        found.append("neither DMA-BUF nor nvidia_peermem; modprobe nvidia_peermem, or use the open kernel modules")
    options = _text(root / "proc/driver/nvidia/params")
    if "PeerMappingOverride=1" not in options and not (root / "dev/gdrdrv").exists():
        found.append(
            "the network card's queues cannot be rung by the GPU, nor by GDRCopy; load nvidia with "
            'NVreg_RegistryDwords="PeerMappingOverride=1;", or install GDRCopy'
        )
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
