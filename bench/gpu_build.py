"""Builds every kernel as a GPU's host does, and says what became of it: python -m bench.gpu_build [--only SOURCE].

NVRTC, then nvJitLink with NVSHMEM's device library where the kernels call it: wheels alone, neither nvcc, a driver nor
a GPU. Exits with 1 for what the compiler warns of, and for a kernel that is missing, keeps anything in local memory,
takes more registers than it may, or has grown.
"""

from __future__ import annotations

import argparse
import re
import struct
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from bench import gpu_ptx
from bench.gpu_run.state import ROOT
from kernels_cuda.build import DTYPES, KERNELS, read_source
from kernels_cuda.residency import SERVE_WARPS, ThreadBlock, fit
from lora_server.device.nvshmem import nvshmem_build
from lora_server.device.nvshmem.nvshmem_build import STATE, Compiled
from lora_server.device.protocol.source import FILES, ONE_WARP, SERVES


class Gpu(NamedTuple):
    """The parameters with which a GPU's kernels are compiled; a test compares them with heuristics.choose."""

    arch: str
    bulk_copy: int
    warps: int
    stages: int = 2

    @property
    def defines(self) -> list[str]:
        """The compiler's options."""
        return [f"-DBULK_COPY={self.bulk_copy}", f"-DWARPS={self.warps}", f"-DSTAGES={self.stages}"]

    @property
    def serving(self) -> Gpu:
        return self._replace(warps=SERVE_WARPS)


GPUS = {"H100, H200": Gpu("sm_90a", 1, 8), "A100": Gpu("sm_80", 0, 6), "A10, L40": Gpu("sm_80", 0, 3)}
HOPPER = "H100, H200"
EVERYWHERE = {  # what a host launches: sources, and the kernels that must be there
    "lora_step.cu": {f"{kernel}_{dtype}" for kernel in KERNELS for dtype in DTYPES},
    "route.cu": {"route"},
    "put.cu": {"put_vectors", "put_halves", "put_e4m3_bfloat16", "put_e4m3_float16", "put_e4m3_float32"},
}
PROTOCOL = {  # between GPUs: for mapped memory, and for NVSHMEM
    "serve.cu": {"serve_bfloat16", "serve_float16"},
    "serve_e4m3.cu": {"serve_e4m3_bfloat16", "serve_e4m3_float16"},
    "link.cu": {
        *("link_put_vectors", "link_put_halves", "link_put_e4m3_bfloat16", "link_put_e4m3_float16", "link_wait"),
        *("link_add_bfloat16", "link_add_float16", "link_add_e4m3_bfloat16", "link_add_e4m3_float16"),
    },
    "push_pull.cu": {"stamp", "raw_put", "take", "await_answer"},  # of a bench
}
BEYOND = {"link.cu": {"link_send"}, "push_pull.cu": {"far_put", "far_take"}}  # with NVSHMEM alone
OTHERS = {path.name: path for path in (ROOT / "bench/gpu_run/push_pull.cu",)}
REGISTERS = 65536  # of a multiprocessor
SERVE_SHARED_BYTES = 186_624  # of a block that serves; a test compares it with heuristics.choose
CLIENTS = {"link.cu": 256, "put.cu": 0}  # their blocks, of so much shared memory, find room beside one that serves
MOST_CODE_BYTES = {"lora_step": 170_000, "shrink": 80_000, "expand": 110_000}  # a sixth more than CUDA 13.0 makes
CALL_FRAME = 8  # bytes: NVSHMEM's put is a function of its library, and no part of the kernel
AT_ONCE = 2
USAGE = re.compile(
    r"Function properties for (\w+)\s+ptxas\s+\.\s+(\d+) bytes stack frame, (\d+) bytes spill stores, "
    r"(\d+) bytes spill loads\s+ptxas info\s+: Used (\d+) registers"
)


class Usage(NamedTuple):
    kernel: str
    stack: int
    spill_stores: int
    spill_loads: int
    registers: int


class Job(NamedTuple):
    name: str
    gpu: str
    nvshmem: bool = False

    @property
    def kernels(self) -> set[str]:
        return (EVERYWHERE | PROTOCOL)[self.name] | (BEYOND.get(self.name, set()) if self.nvshmem else set())

    @property
    def variant(self) -> Gpu:
        gpu = GPUS[self.gpu]
        return gpu.serving if self.name in SERVES else gpu

    def block(self, usage: Usage) -> ThreadBlock:
        if self.name in SERVES:
            return ThreadBlock(SERVE_WARPS + 1, usage.registers, SERVE_SHARED_BYTES)
        return ThreadBlock(1 if usage.kernel in ONE_WARP else self.variant.warps, usage.registers, CLIENTS[self.name])

    def complaints(self, usage: Usage, code_bytes: int) -> list[str]:
        frame = CALL_FRAME if self.nvshmem else 0
        registers = REGISTERS // (32 * (self.variant.warps + (self.name in SERVES)))
        most = MOST_CODE_BYTES.get(usage.kernel.rpartition("_")[0], sys.maxsize)
        rules = {
            f"{usage.stack} bytes of stack": usage.stack <= frame,
            f"spills of {usage.spill_stores} and {usage.spill_loads} bytes": not usage.spill_stores + usage.spill_loads,
            f"{usage.registers} registers, expected at most {registers}": usage.registers <= registers,
            f"{code_bytes} bytes of code, expected some, and at most {most}": 0 < code_bytes <= most,
        }
        return [f"{self}: {usage.kernel}: {rule}" for rule, holds in rules.items() if not holds]


JOBS = [Job(name, gpu) for name in EVERYWHERE for gpu in GPUS]
JOBS += [Job(name, HOPPER, nvshmem) for name in PROTOCOL for nvshmem in (False, True)]


def compiled(job: Job) -> Compiled:
    """Raises BuildError with the compiler's words."""
    source = read_source(job.name, FILES | {name: path.read_text() for name, path in OTHERS.items()})
    options = ["--ptxas-options=-v", *job.variant.defines]
    if job.nvshmem:
        return nvshmem_build.compiled(source, GPUS[job.gpu].arch, [*options, "-DNVSHMEM=1"])
    return nvshmem_build.compiled_alone(source, GPUS[job.gpu].arch, options)


def code_bytes(cubin: bytes) -> dict[str, int]:
    """Read the size of each kernel's machine code: the sections .text.KERNEL of a 64-bit ELF file."""
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names = struct.unpack_from("<3H", cubin, 0x3A)
    sections = [struct.unpack_from("<IIQQQQ", cubin, table + i * size) for i in range(count)]
    strings = cubin[sections[names][4] :]
    named = {strings[begin : strings.index(b"\0", begin)].decode(): nbytes for begin, *_, nbytes in sections}
    return {name.removeprefix(".text."): nbytes for name, nbytes in named.items() if name.startswith(".text.")}


def crowded(usages: dict[Job, list[Usage]]) -> list[str]:
    """List the client kernels that do not fit beside a serving block on a multiprocessor of the same GPU."""
    kernels = [(job, usage) for job, its in usages.items() for usage in its]
    serving = [(job, usage) for job, usage in kernels if job.name in SERVES]
    clients = [(job, usage) for job, usage in kernels if job.name in CLIENTS]
    return [
        f"{job}: {its.kernel}, of {its.registers} registers, finds no room beside {serves.kernel}, of "
        f"{serves.registers}: see kernels_cuda/residency.py"
        for server, serves in serving
        for job, its in clients
        if job.gpu == server.gpu and not fit([server.block(serves), job.block(its)])
    ]


def build(job: Job) -> tuple[list[Usage], list[str]]:
    """Compile and link a source. Returns its kernels' usage and everything wrong with them; prints a line."""
    began = time.monotonic()
    code, said, ptx = compiled(job)
    wrong = [f"{job}: {line}" for line in said.splitlines() if "warning" in line and not job.nvshmem]
    sizes = code_bytes(code)
    if job.nvshmem:
        code = nvshmem_build.linked(code, GPUS[job.gpu].arch)
        if STATE not in code:
            wrong.append(f"{job}: no {STATE.decode()} in the linked module")
    usages = [Usage(kernel, *map(int, numbers)) for kernel, *numbers in USAGE.findall(said)]
    kernels = [usage for usage in usages if usage.kernel in job.kernels]
    for usage in kernels:
        wrong += job.complaints(usage, sizes.get(usage.kernel, 0))
    threads = 32 * (job.variant.warps + (job.name in SERVES))
    texts = gpu_ptx.kernels(ptx)
    for kernel in job.kernels if job.name != "push_pull.cu" else ():
        its = gpu_ptx.complaints(kernel, texts.get(kernel, ""), bool(job.variant.bulk_copy), job.variant.warps, threads)
        wrong += [f"{job}: {kernel}: {complaint}" for complaint in its]
    missing = job.kernels - {usage.kernel for usage in kernels if usage.kernel.encode() in code}
    wrong += [f"{job}: no {kernel} in the module" for kernel in sorted(missing)]
    registers = ", ".join(f"{usage.kernel} {usage.registers}" for usage in sorted(kernels))
    where = f"{job.gpu}{', NVSHMEM' if job.nvshmem else ''}"
    took = time.monotonic() - began
    print(f"{job.name} for {where}: {len(code)} bytes in {took:.0f} s; registers: {registers}", flush=True)
    return kernels, wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=[*EVERYWHERE, *PROTOCOL], help="one source")
    only = parser.parse_args().only
    with ThreadPoolExecutor(AT_ONCE) as pool:
        jobs = [job for job in JOBS if only in (None, job.name)]
        found = dict(zip(jobs, pool.map(build, jobs), strict=True))
    wrong = [line for _, lines in found.values() for line in lines]
    wrong += crowded({job: kernels for job, (kernels, _) in found.items()})
    apart = "" if only is None else "; whether they fit beside each other was not looked at"
    print("\n".join(wrong) or f"every kernel is there, is small, and keeps everything in registers{apart}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
