"""Builds the device protocol's kernels as a GPU's host does, and says what became of them: python -m bench.gpu_build.

NVRTC, then nvJitLink with NVSHMEM's device library where the kernels call it: wheels alone, neither nvcc, a driver nor
a GPU. Exits with 1 if a kernel is missing, keeps anything in local memory, or takes more registers than it may.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from typing import NamedTuple

from bench.gpu_run.nvshmem_build import BEFORE, BuildError, cstdint, includes, linked
from kernels_cuda.build import STANDARD, read_source
from lora_server.transport.gpu.source import FILES

ARCH = "sm_90a"
DEFINES = ("-DBULK_COPY=1", "-DWARPS=8", "-DSTAGES=2")  # heuristics.choose for an H100
MOST_REGISTERS = 168
CALL_FRAME = 8  # bytes: NVSHMEM's put is a function of its library, and no part of the kernel
KERNELS = {
    "serve.cu": ("serve_bfloat16", "serve_float16"),
    "link.cu": ("link_put_vectors", "link_put_halves", "link_wait", "link_add_bfloat16", "link_add_float16"),
}
STATE = b"nvshmemi_device_state_d"
USAGE = re.compile(
    r"Function properties for (\w+)\s+ptxas\s+\.\s+(\d+) bytes stack frame, (\d+) bytes spill stores, "
    r"(\d+) bytes spill loads\s+ptxas info\s+: Used (\d+) registers"
)


class Usage(NamedTuple):
    """What the assembler says of a kernel."""

    kernel: str
    stack: int
    spill_stores: int
    spill_loads: int
    registers: int

    def fits(self, nvshmem: bool) -> bool:
        """No local memory but a call's frame, and registers for a block of nine warps."""
        most = CALL_FRAME if nvshmem else 0
        return self.stack <= most and not (self.spill_stores or self.spill_loads) and self.registers <= MOST_REGISTERS


def compiled(name: str, nvshmem: bool, arch: str = ARCH) -> tuple[bytes, list[Usage]]:
    """Machine code of one source. Raises BuildError with the compiler's words."""
    from cuda.bindings import nvrtc

    source, headers, names = read_source(name, FILES), list[bytes](), list[bytes]()
    options = [STANDARD, f"-arch={arch}", "--ptxas-options=-v", *DEFINES]
    if nvshmem:
        source = BEFORE + source
        headers, names = [cstdint().encode()], [b"cuda/std/cstdint"]
        options += ["-rdc=true", "-default-device", "-DNVSHMEM=1", *(f"-I{folder}" for folder in includes())]
    _, program = nvrtc.nvrtcCreateProgram(source.encode(), name.encode(), len(headers), headers, names)
    (error,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    _, size = nvrtc.nvrtcGetProgramLogSize(program)
    log = b" " * size
    nvrtc.nvrtcGetProgramLog(program, log)
    said = log.decode(errors="replace")
    if int(error):
        raise BuildError(said[:2000])
    _, size = nvrtc.nvrtcGetCUBINSize(program)
    code = b" " * size
    nvrtc.nvrtcGetCUBIN(program, code)
    return bytes(code), [Usage(kernel, *map(int, numbers)) for kernel, *numbers in USAGE.findall(said)]


def build(name: str, nvshmem: bool) -> list[str]:
    """What is wrong with a source's kernels, once linked; a line for each goes to stdout."""
    began = time.monotonic()
    code, usages = compiled(name, nvshmem)
    wrong = []
    if nvshmem:
        code = linked(code, ARCH)
        if STATE not in code:
            wrong.append(f"{name}: no {STATE.decode()} in the linked module")
    for usage in usages:
        if usage.kernel in KERNELS[name]:
            print(f"{'nvshmem' if nvshmem else 'gpu'} {usage.kernel}: {usage.registers} registers", flush=True)
            if not usage.fits(nvshmem):
                wrong.append(f"{name}: {usage}")
    for kernel in KERNELS[name]:
        if kernel not in {usage.kernel for usage in usages} or kernel.encode() not in code:
            wrong.append(f"{name}: no {kernel} in the module")
    print(f"  {name}: {len(code)} bytes in {time.monotonic() - began:.0f} s", flush=True)
    return wrong


def main() -> int:
    """All of them, or some."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=KERNELS, help="one source")
    arguments = parser.parse_args()
    names = [arguments.only] if arguments.only else list(KERNELS)
    wrong = [line for nvshmem in (False, True) for name in names for line in build(name, nvshmem)]
    print("\n".join(wrong) or "every kernel is there, and keeps everything in registers")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
