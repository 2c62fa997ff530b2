"""Device code that calls NVSHMEM, built where it runs: NVRTC, then nvJitLink with NVSHMEM's device library.

Neither nvcc nor a driver is needed, only wheels: cuda-bindings, nvidia-nvshmem-cu13, nvidia-cuda-nvrtc,
nvidia-nvjitlink, nvidia-cuda-runtime and nvidia-cuda-cccl. What came out is kept on disk.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

STANDARD = "-std=c++17"
STATE = b"nvshmemi_device_state_d"  # what NVSHMEM's host library initialises in a module
TOOLKITS = (Path("/usr/local/cuda"),)  # where headers are, if not in wheels
# NVSHMEM's headers want std::, and NVRTC has none
BEFORE = """#include <cuda/std/cstdint>
#include <cuda/std/type_traits>
namespace std { using namespace ::cuda::std; }
"""
SIGNED = {8: "signed char", 16: "short", 32: "int", 64: "long"}


class Compiled(NamedTuple):
    """The output of NVRTC for a source, and its messages."""

    code: bytes
    said: str
    ptx: str


class BuildError(Exception):
    """The compiler or the linker refused; the message is theirs."""


def cstdint() -> str:
    """<cstdint> with a 64-bit integer that is a long, as where the library was built: else names mangle otherwise."""
    lines, names = ["#pragma once"], []

    def define(name: str, kind: str) -> None:
        lines.append(f"typedef {kind} {name};")
        names.append(name)

    for bits, kind in SIGNED.items():
        wide = "long" if bits > 8 else kind  # what "fast" is on this ABI
        for prefix, signed in (("", kind), ("_least", kind), ("_fast", wide)):
            define(f"int{prefix}{bits}_t", signed)
            define(f"uint{prefix}{bits}_t", f"unsigned {signed.removeprefix('signed ')}")
        lines.append(f"#define INT{bits}_MAX {2 ** (bits - 1) - 1}{'L' if bits == 64 else ''}")
        lines.append(f"#define INT{bits}_MIN (-INT{bits}_MAX - 1)")
        lines.append(f"#define UINT{bits}_MAX {2**bits - 1}{'UL' if bits == 64 else 'U' if bits == 32 else ''}")
    for name, kind in (("intptr_t", "long"), ("uintptr_t", "unsigned long"), ("intmax_t", "long"),
                       ("uintmax_t", "unsigned long")):  # fmt: skip
        define(name, kind)
    using = "".join(f"using ::{name}; " for name in names)
    return "\n".join([*lines, f"namespace cuda {{ namespace std {{ {using} }} }}"]) + "\n"


def nvidia_folders() -> list[Path]:
    """Every folder of the namespace package that NVIDIA's wheels share."""
    try:
        return [Path(folder) for folder in importlib.import_module("nvidia").__path__]
    except ImportError:
        return []


def find(inside: tuple[str, ...], what: str) -> Path:
    """The first of these files in NVIDIA's wheels or a toolkit; raises FileNotFoundError."""
    for folder in (*nvidia_folders(), *TOOLKITS):
        for name in inside:
            if (folder / name).exists():
                return folder / name
    raise FileNotFoundError(f"{what}: none of {', '.join(inside)} in {[str(one) for one in nvidia_folders()]}")


def library() -> Path:
    """NVSHMEM's device library."""
    return find(("nvshmem/lib/libnvshmem_device.a",), "nvidia-nvshmem-cu13")


def includes() -> list[Path]:
    """Folders of headers; raises FileNotFoundError for a package that is missing."""
    nvshmem = find(("nvshmem/include/nvshmem.h",), "nvidia-nvshmem-cu13")
    runtime = find(("cu13/include/cuda_runtime.h", "include/cuda_runtime.h"), "nvidia-cuda-runtime")
    cccl = find(
        ("cu13/include/cccl/cuda/std/cstdint", "include/cccl/cuda/std/cstdint"), "nvidia-cuda-cccl"
    )  # not CuPy's own: its namespace has a version, which hides our <cstdint>
    return [nvshmem.parent, runtime.parent, cccl.parent.parent.parent]


def missing() -> str:
    """Return what `build` lacks here; "" if nothing."""
    try:
        includes(), library()
        from cuda.bindings import nvjitlink, nvrtc

        _succeeded(nvrtc, nvrtc.nvrtcVersion()[0])
        nvjitlink.version()
    except Exception as problem:
        return f"{type(problem).__name__}: {str(problem).splitlines()[0]}"
    return ""


def compiled(source: str, arch: str, options: Sequence[str] = ()) -> Compiled:
    """Relocatable machine code for `arch` (sm_90a). Raises BuildError."""
    given = ["-rdc=true", "-default-device", *options, *(f"-I{folder}" for folder in includes())]
    return compiled_alone(BEFORE + source, arch, given, {"cuda/std/cstdint": cstdint()})


def compiled_alone(
    source: str, arch: str, options: Sequence[str] = (), headers: Mapping[str, str] = MappingProxyType({})
) -> Compiled:
    """NVRTC, without NVSHMEM: machine code for `arch`. Raises BuildError with the compiler's words."""
    from cuda.bindings import nvrtc

    def read(what: str) -> bytes:
        error, size = getattr(nvrtc, f"nvrtcGet{what}Size")(program)
        _succeeded(nvrtc, error)
        data = b" " * int(size)
        _succeeded(nvrtc, *getattr(nvrtc, f"nvrtcGet{what}")(program, data))
        return data

    given = [STANDARD, f"-arch={arch}", *options]
    texts, names = [text.encode() for text in headers.values()], [name.encode() for name in headers]
    error, program = nvrtc.nvrtcCreateProgram(source.encode(), b"kernels.cu", len(names), texts, names)
    _succeeded(nvrtc, error)
    (error,) = nvrtc.nvrtcCompileProgram(program, len(given), [option.encode() for option in given])
    said = read("ProgramLog").decode(errors="replace")
    if int(error):
        raise BuildError(said[:2000])
    return Compiled(read("CUBIN"), said, read("PTX").decode())


def _succeeded(nvrtc: Any, error: Any) -> None:
    if int(error):
        raise BuildError(f"NVRTC: {nvrtc.nvrtcGetErrorString(error)[1].decode()}")


def linked(code: bytes, arch: str) -> bytes:
    """nvJitLink: a module that can be loaded, NVSHMEM's device functions in it. Raises BuildError."""
    from cuda.bindings import nvjitlink

    handle = nvjitlink.create(1, [f"-arch={arch}"])
    try:
        nvjitlink.add_data(handle, nvjitlink.InputType.CUBIN, code, len(code), "nvshmem")
        nvjitlink.add_file(handle, nvjitlink.InputType.LIBRARY, str(library()))
        nvjitlink.complete(handle)
        module = bytearray(nvjitlink.get_linked_cubin_size(handle))
        nvjitlink.get_linked_cubin(handle, module)
        return bytes(module)
    except nvjitlink.nvJitLinkError as problem:
        log = bytearray(nvjitlink.get_error_log_size(handle))
        nvjitlink.get_error_log(handle, log)
        raise BuildError(f"{problem}: {log.decode(errors='replace')[:2000]}") from problem
    finally:
        nvjitlink.destroy(handle)


def build(source: str, arch: str, options: Sequence[str] = ()) -> bytes:
    """Build a module for `arch`. Raises BuildError, FileNotFoundError."""
    return linked(compiled(source, arch, options).code, arch)


def cached(source: str, arch: str, options: Sequence[str], folder: Path) -> Path:
    """Return the module of `build` as a file, named by a hash of all that it is made of, and renamed into place."""
    from cuda.bindings import nvrtc

    device, version = library().stat(), nvrtc.nvrtcVersion()[1:]
    made_of = (source, arch, *options, version, str(library()), device.st_size, device.st_mtime_ns)
    path = folder / f"lora-{hashlib.sha256(repr(made_of).encode()).hexdigest()[:32]}.cubin"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        module = build(source, arch, options)
        descriptor, name = tempfile.mkstemp(dir=folder)
        with os.fdopen(descriptor, "wb") as file:
            file.write(module)
        Path(name).replace(path)
    return path
