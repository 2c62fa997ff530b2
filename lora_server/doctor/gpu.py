"""GPUs, NVSHMEM, InfiniBand; --device cpu needs none of them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

from lora_server.device.nvshmem import nvshmem_build
from lora_server.device.protocol import needs
from lora_server.doctor.machine import Finding, Machine, failed, ok, warning
from lora_server.units import size

OLDEST_DRIVER = 580  # of CUDA 13
OLDEST_GPU = (8, 0)
NVSHMEM, NVSHMEM4PY = "nvidia-nvshmem-cu13", "nvshmem4py-cu13"
CUPY = "cupy-cuda13x"


def gpus(machine: Machine) -> Iterator[Finding]:
    """Check the driver, then torch's view of it, then the compiler of the kernels."""
    text = machine.read("/proc/driver/nvidia/version")
    if text is None:
        files = [entry.name for entry in machine.entries("/dev") if re.fullmatch(r"nvidia\d+", entry.name)]
        if files:
            cure = "load the host's driver (nvidia-smi must work), or use the container toolkit that brings it along"
            yield failed("driver", f"none, though there are {', '.join(files)}", cure)
        else:
            yield ok("gpu", "none: use --device cpu")
        return
    found = re.search(r"\s(\d+)\.\d+", text)
    if found is None or int(found[1]) < OLDEST_DRIVER:
        got = found[0].strip() if found else text.splitlines()[0]
        yield failed("driver", got, f"install {OLDEST_DRIVER} or newer, which CUDA 13 needs; or use --device cpu")
        return
    yield ok("driver", found[0].strip())
    yield from _torch()
    yield _installed(
        "compiler",
        CUPY,
        "pip install '.[cuda]' in a checkout of lora-server: it compiles the kernels at the first start",
    )


def _torch() -> Iterator[Finding]:
    import torch

    if torch.version.cuda is None:
        yield failed("torch", f"{torch.__version__}, built without CUDA", "install the build of torch with CUDA 13")
        return
    if not torch.cuda.is_available():
        cure = "nvidia-smi must show a GPU; in a container: --gpus all; under a scheduler: ask it for one"
        yield failed("torch", f"{torch.__version__} sees no GPU", cure)
        return
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        capability = (properties.major, properties.minor)
        text = f"{properties.name}, {size(properties.total_memory)}, sm_{properties.major}{properties.minor}"
        if capability < OLDEST_GPU:
            yield failed(f"gpu {index}", text, f"take one of sm_{OLDEST_GPU[0]}{OLDEST_GPU[1]} or newer")
        else:
            yield ok(f"gpu {index}", text)
            yield from _transport(index)


def _transport(index: int) -> Iterator[Finding]:
    """Check the needs of --gpu-transport gpu beyond those of cuda_ipc."""
    for lack in needs.missing(needs.ask(index)):
        found, _, cure = lack.rpartition("; ")
        yield warning(f"gpu {index}", f"for --gpu-transport gpu: {found}", cure)


def _installed(check: str, package: str, cure: str) -> Finding:
    try:
        return ok(check, f"{package} {version(package)}")
    except PackageNotFoundError:
        return failed(check, f"no {package}", cure)


def nvshmem(machine: Machine) -> Iterator[Finding]:
    """Check that both packages are installed, or neither; without a driver nothing uses them."""
    if machine.read("/proc/driver/nvidia/version") is None:
        return
    found = {}
    for package in (NVSHMEM, NVSHMEM4PY):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    if len(found) == 1:
        missing = ({NVSHMEM, NVSHMEM4PY} - found.keys()).pop()
        yield warning(
            "nvshmem",
            f"{', '.join(found)} without {missing}",
            "pip install '.[cuda]' in a checkout of lora-server, or remove the other",
        )
    elif found:
        lacks = needs.missing_for_nvshmem(needs.host_library, nvshmem_build.missing)
        for lack in lacks:
            what, _, cure = lack.rpartition("; ")
            yield warning("nvshmem", f"for --gpu-transport nvshmem: {what}", cure)
        if not lacks:
            yield ok("nvshmem", ", ".join(f"{name} {number}" for name, number in found.items()))
    else:
        yield ok("nvshmem", "not installed: GPUs of one host need none")


def infiniband(machine: Machine) -> Iterator[Finding]:
    """Check that ports are up, and that a NIC may read a GPU's memory."""
    adapters = machine.entries("/sys/class/infiniband")
    if not adapters:
        yield ok("infiniband", "none: nodes talk TCP")
        return
    for adapter in adapters:
        for port in machine.entries(f"/sys/class/infiniband/{adapter.name}/ports"):
            base = f"/sys/class/infiniband/{adapter.name}/ports/{port.name}"
            name = f"{adapter.name}/{port.name}"
            state, rate = ((machine.read(f"{base}/{what}") or "?").strip() for what in ("state", "rate"))
            if "ACTIVE" in state:
                yield ok("infiniband", f"{name}: {state}, {rate}")
            else:
                yield warning("infiniband", f"{name}: {state}", "look at the cable and the subnet manager (ibstat)")
    if machine.read("/proc/driver/nvidia/version") is None:
        return
    for lack in needs.missing_for_network(machine.root):
        found, _, cure = lack.partition("; ")
        yield warning("gpu and nic", found, cure)
