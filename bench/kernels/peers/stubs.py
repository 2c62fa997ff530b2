"""Stand-ins for the modules that a peer's kernel files import, so that nothing else of the peer is needed."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, dataclass_transform

import torch


def package(name: str, folder: Path) -> None:
    """Register a package for its submodules alone: its own __init__ is not run."""
    module = ModuleType(name)
    module.__path__ = [str(folder)]
    sys.modules[name] = module


def stub(name: str, **members: Any) -> ModuleType:
    module = ModuleType(name)
    module.__dict__.update(members)
    sys.modules[name] = module
    parent, _, child = name.rpartition(".")
    if parent in sys.modules:
        setattr(sys.modules[parent], child, module)
    return module


def load(name: str) -> ModuleType:
    sys.modules.pop(name, None)
    return importlib.import_module(name)


@dataclass_transform(frozen_default=True, kw_only_default=True)
class Struct:
    """A stand-in for msgspec.Struct with the part that a peer uses: frozen fields, given by keyword."""

    def __init_subclass__(cls, **kwargs: bool) -> None:
        dataclasses.dataclass(**kwargs)(cls)  # type: ignore[call-overload]


def refuse(*_: Any, **__: Any) -> None:
    """Raise NotImplementedError: stands in for a function that the measured path must not reach."""
    raise NotImplementedError("this part of the peer is not loaded")


def capability() -> tuple[int, int]:
    return torch.cuda.get_device_capability()


class Platform:
    def num_compute_units(self, index: int | None = None) -> int:
        return torch.cuda.get_device_properties(index or 0).multi_processor_count

    def is_cuda(self) -> bool:
        return True

    def is_cuda_alike(self) -> bool:
        return True

    def is_xpu(self) -> bool:
        return False

    def has_device_capability(self, wanted: int) -> bool:
        major, minor = capability()
        return major * 10 + minor >= wanted

    def is_device_capability(self, wanted: int) -> bool:
        major, minor = capability()
        return major * 10 + minor == wanted


class Logger:
    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


class Envs:
    VLLM_BATCH_INVARIANT = False
    VLLM_LORA_ENABLE_DUAL_STREAM = False
    VLLM_LORA_DISABLE_PDL = False
    VLLM_TUNED_CONFIG_FOLDER = None


def _not_registered(*_: Any, **__: Any) -> None:
    raise AttributeError("no operator registry here; the plain functions are used")


def _to_device(values: list[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64).to(device).view(dtype)


def vllm_modules(root: Path) -> None:
    import triton
    import triton.language as tl

    for name in ("vllm", "vllm.lora", "vllm.lora.ops", "vllm.lora.ops.triton_ops", "vllm.utils"):
        package(name, root / Path(*name.split(".")))
    stub("vllm.distributed", tensor_model_parallel_all_gather=refuse, tensor_model_parallel_all_reduce=refuse)
    stub("vllm.platforms", current_platform=Platform())
    stub("vllm.triton_utils", tl=tl, triton=triton).__path__ = []
    stub("vllm.triton_utils.allocation", set_triton_allocator=refuse)
    stub("vllm.utils.mem_utils", get_max_shared_memory_bytes=_shared_bytes)
    stub("vllm.utils.math_utils", next_power_of_2=triton.next_power_of_2)
    stub("vllm.utils.torch_utils", async_tensor_h2d=_to_device, direct_register_custom_op=_not_registered)
    stub("vllm.logger", init_logger=lambda _: Logger())
    stub("vllm.envs", **{name: getattr(Envs, name) for name in vars(Envs) if name.isupper()})


def _shared_bytes(index: int | None = None) -> int:
    return int(torch.cuda.get_device_properties(index or 0).shared_memory_per_block_optin)


def sglang_modules(root: Path) -> None:
    names = ("sglang", "sglang.kernels", "sglang.kernels.ops", "sglang.kernels.ops.lora")
    for name in (*names, "sglang.kernels.ops.lora.common", "sglang.kernels.ops.lora.moe", "sglang.kernels.jit"):
        package(name, root / Path(*name.split(".")))
    stub("sglang.kernels.ops.lora.moe.virtual_experts", _align_block_size_jit=refuse)
    stub("sglang.kernels.jit.utils", is_arch_support_pdl=lambda: capability() >= (9, 0))
    if importlib.util.find_spec("msgspec") is None:
        stub("msgspec", Struct=Struct)
