"""The CUDA kernels' own source on this CPU, for tests: see tests/support/gpu/emulator/ptx.cuh."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType

import torch

from kernels_cuda.build import STANDARD, read_source
from kernels_cuda.heuristics import Variant
from kernels_cuda.launch import DTYPE_NAMES, DeviceStep, Workspace, arguments
from lora_server.device.protocol.source import FILES

EMULATOR = Path(__file__).parent / "emulator"
GRID = 2  # blocks
STACK_BYTES = 64 << 10  # of a thread
COMPILER = shutil.which("g++")
MISSING = "" if COMPILER and platform.machine() == "x86_64" else "needs g++ on x86-64"


def library(source: str, variant: Variant, instead: Mapping[str, str]) -> ctypes.CDLL:
    """Kernels and what plays them; see emulator/run.cpp. Its `bounds`: threads that each kernel may have."""
    text = _text(source, tuple(sorted(instead.items())))
    library = _library(variant, text, STACK_BYTES // 2)
    library.bounds = launch_bounds(text, variant.warps)
    return library


def launch_bounds(text: str, warps: int) -> dict[str, int]:
    """Read each kernel's __launch_bounds__ for blocks of `warps` computing warps; macros define some kernels."""
    found = {}
    for its in re.finditer(r"__launch_bounds__\(([^,()]+)[^()]*\)[\s\\]+(\w+)\(", text):
        macros = re.findall(r"^#define (\w+)\((\w+),", text[: its.start()], re.MULTILINE)
        is_macro = macros and macros[-1][1] == its[2]
        kernels = re.findall(rf"^{macros[-1][0]}\((\w+),", text, re.MULTILINE) if is_macro else [its[2]]
        terms = re.findall(r"([+-]?) *(\w+)", its[1])
        threads = sum((-1 if sign == "-" else 1) * {"THREADS": 32 * warps, "LANES": 32}[name] for sign, name in terms)
        found |= dict.fromkeys(kernels, threads)
    return found


@cache
def _text(name: str, instead: tuple[tuple[str, str], ...]) -> str:
    texts = {path.name: path.read_text() for path in EMULATOR.glob("*.cuh")}  # before the kernels' own
    return read_source(name, FILES | texts | dict(instead)) + (EMULATOR / "run.cpp").read_text()


@cache
def _library(variant: Variant, source: str, stack_bytes: int = STACK_BYTES) -> ctypes.CDLL:
    """Compiled once per content; processes share it, and wait for each other."""
    command = [str(COMPILER), "-O1", "-shared", "-fPIC", "-fno-gnu-unique", "-w", STANDARD, *variant.defines]
    command += [f"-DSTACK_BYTES={stack_bytes}", "-x", "c++", "-"]
    digest = hashlib.sha256("\0".join([source, *command]).encode()).hexdigest()[:16]
    built = Path(tempfile.gettempdir()) / f"lora-kernels-{os.getuid()}-{digest}.so"
    with built.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not built.exists():
            half = built.with_suffix(".half")  # of one that is killed meanwhile
            subprocess.run([*command, "-o", str(half)], input=source, text=True, check=True)
            half.replace(built)
    return ctypes.CDLL(str(built))


def launch(
    step: DeviceStep, out: torch.Tensor, workspace: Workspace, variant: Variant, *, kernel: str = "lora_step",
    late: bool = True, grid: int = GRID, instead: Mapping[str, str] = MappingProxyType({}),
) -> None:  # fmt: skip
    """`kernel` over the whole step; `late`: copies happen when they are waited for; `instead`: see `read_source`."""
    values = arguments(step, out, workspace, variant.stages)
    run(f"{kernel}_{DTYPE_NAMES[step.rows_TK.dtype]}", values, variant, grid=grid, late=late, instead=instead)


def run(
    kernel: str, values: list[int], variant: Variant, *, source: str = "lora_step.cu", grid: int = 1, late: bool = True,
    stack_bytes: int = STACK_BYTES, instead: Mapping[str, str] = MappingProxyType({}),
) -> None:  # fmt: skip
    library = _library(variant, _text(source, tuple(sorted(instead.items()))), stack_bytes)
    address = ctypes.cast(library[kernel], ctypes.c_void_p)
    values_64 = (ctypes.c_int64 * len(values))(*values)
    code = library.run(address, grid, int(late), library.shared_bytes(), values_64, len(values))
    assert code == 0, f"{kernel}: {code}"


def shared_bytes(variant: Variant, source: str = "lora_step.cu") -> int:
    return int(_library(variant, _text(source, ())).shared_bytes())
