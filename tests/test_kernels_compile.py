"""Every kernel, in every variant that the heuristics choose, compiles, keeps everything in registers, and is small."""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
import sys
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch

from kernels_cuda import build
from kernels_cuda.cuda import CudaKernels
from kernels_cuda.heuristics import Variant, choose
from lora_server.transport import put
from lora_server.transport.gpu.source import FILES

NVCC = shutil.which("nvcc")
GPUS = {  # what compute capability, code and shared memory per block they have
    "H100, H200": ((9, 0), "90a", 232448),
    "A100": ((8, 0), "80", 166912),
    "A10, L40": ((8, 6), "80", 101376),
}
USAGE = re.compile(
    r"Compiling entry function '(\w+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
    r".*?Used (\d+) registers",
    re.DOTALL,
)
MOST_CODE_BYTES = {"lora_step": 170_000, "shrink": 80_000, "expand": 110_000}  # a sixth more than nvcc 13.0 makes


def compiled(name: str, code: str, variant: Variant, cubin: Path) -> str:
    """What the assembler says of one file in one variant."""
    command = [str(NVCC), build.STANDARD, f"-gencode=arch=compute_{code},code=sm_{code}", "-cubin", "-Xptxas", "-v"]
    command += ["-Werror", "all-warnings", *variant.defines, "-x", "cu", "-", "-o", str(cubin)]
    source = build.read_source(name, put.FILES | FILES)
    done = subprocess.run(command, input=source, text=True, capture_output=True, timeout=150)
    assert done.returncode == 0, f"{name} for sm_{code}: {done.stderr}"
    return done.stderr


def code_bytes(cubin: bytes) -> dict[str, int]:
    """Machine code of each kernel: the sections .text.KERNEL of an ELF file of 64 bits."""
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names = struct.unpack_from("<3H", cubin, 0x3A)
    sections = [struct.unpack_from("<IIQQQQ", cubin, table + i * size) for i in range(count)]
    strings = cubin[sections[names][4] :]
    named = {strings[begin : strings.index(b"\0", begin)].decode(): nbytes for begin, *_, nbytes in sections}
    return {name.removeprefix(".text."): nbytes for name, nbytes in named.items() if name.startswith(".text.")}


@pytest.mark.timeout(900)
@pytest.mark.skipif(NVCC is None, reason="needs nvcc")
def test_every_kernel_compiles_to_little_code_without_local_memory(tmp_path):
    files = sorted(path.name for path in build.SOURCE.glob("*.cu"))
    files.append("put.cu")
    jobs = [(name, code, choose(capability, shared)) for name in files for capability, code, shared in GPUS.values()]
    cubins = [tmp_path / f"{i}.cubin" for i in range(len(jobs))]
    with ThreadPoolExecutor(2) as pool:
        logs = list(pool.map(lambda job, cubin: compiled(*job, cubin), jobs, cubins))
    kernels = set()
    for (name, code, variant), log, cubin in zip(jobs, logs, cubins, strict=True):
        sizes = code_bytes(cubin.read_bytes())
        found = USAGE.findall(log)
        assert found, log
        for kernel, *usage in found:
            stack, stores, loads, registers = map(int, usage)
            assert (stack, stores, loads) == (0, 0, 0), f"{name} {kernel} sm_{code} {variant}: {log}"
            assert registers * variant.warps * 32 <= 65536
            most = MOST_CODE_BYTES.get(kernel.rpartition("_")[0])
            assert sizes[kernel] > 0 and (most is None or sizes[kernel] <= most), f"{kernel} sm_{code}: {sizes[kernel]}"
            kernels.add(kernel)
    assert kernels >= {f"{kernel}_{dtype}" for kernel in build.KERNELS for dtype in build.DTYPES}


@pytest.mark.skipif(NVCC is None, reason="needs nvcc")
@pytest.mark.parametrize("name, kernel", [("serve.cu", "serve_bfloat16"), ("link.cu", "link_wait")])
def test_the_protocol_between_gpus_compiles_without_local_memory(name, kernel, tmp_path):
    """For NVSHMEM, and with the compiler that a GPU's host has: make gpu-build."""
    capability, code, shared = GPUS["H100, H200"]
    found = USAGE.findall(compiled(name, code, choose(capability, shared), tmp_path / "cubin"))
    assert kernel in [one for one, *_ in found]
    for one, stack, stores, loads, registers in found:
        assert (stack, stores, loads) == ("0", "0", "0") and int(registers) <= 168, f"{one}: {registers} registers"


def test_the_variant_of_each_gpu():
    chosen = {name: choose(capability, shared) for name, (capability, _, shared) in GPUS.items()}
    assert chosen["H100, H200"] == Variant(bulk_copy=True, warps=8)
    assert not chosen["A100"].bulk_copy and chosen["A100"].warps == 6
    assert chosen["A10, L40"].warps == 4
    for name, (_, _, shared) in GPUS.items():
        assert chosen[name].shared_bytes <= shared


def test_gpus_that_cannot_run_them_are_refused():
    with pytest.raises(ValueError, match=r"\(7, 5\), expected at least \(8, 0\)"):
        choose((7, 5), 65536)
    with pytest.raises(ValueError, match="16384 bytes of shared memory"):
        choose((8, 0), 16384)


def test_the_source_is_one_text_with_each_file_once():
    text = build.read_source()
    assert "#include" not in text and "#pragma once" not in text
    assert text.count("struct Args {") == text.count("struct Ring {") == 1
    assert "instead" in build.read_source(instead={"ptx.cuh": "// instead"})


def test_a_kernel_alone_is_the_text_without_the_others():
    kernels = [f"{kernel}_{dtype}" for kernel in build.KERNELS for dtype in build.DTYPES]
    for name in kernels:
        text = build.read_kernel(name)
        assert [kernel for kernel in kernels if f"KERNEL({kernel}," in text] == [name]
        assert len(text.splitlines()) == len(build.read_source().splitlines()) - len(kernels) + 1


class FakeCuPy(types.ModuleType):
    """As much of CuPy as compiling takes; `compiled` holds the texts."""

    def __init__(self) -> None:
        super().__init__("cupy")
        self.compiled: list[str] = []
        device = MagicMock()
        device.return_value.attributes = {"MaxSharedMemoryPerBlockOptin": 232448, "MultiProcessorCount": 132}
        self.cuda = types.SimpleNamespace(Device=device)

    def RawModule(self, *, code: str, options: tuple[str, ...], enable_cooperative_groups: bool) -> MagicMock:  # noqa: N802
        assert enable_cooperative_groups and build.STANDARD in options
        self.compiled.append(code)
        return MagicMock()


def test_a_process_compiles_what_it_launches_and_nothing_else(monkeypatch):
    fake = FakeCuPy()
    monkeypatch.setitem(sys.modules, "cupy", fake)
    kernels = CudaKernels(torch.device("cuda", 0), Variant(bulk_copy=True, warps=8))
    assert not fake.compiled
    assert kernels.compile(torch.bfloat16) > 0
    assert kernels.compile(torch.bfloat16) == 0
    assert fake.compiled == [build.read_kernel("lora_step_bfloat16")]
    kernels.compile(torch.float16, "shrink")
    assert fake.compiled[1:] == [build.read_kernel("shrink_float16")]
    with pytest.raises(ValueError, match=r"got torch.float32, expected torch.bfloat16 or torch.float16"):
        kernels.compile(torch.float32)
