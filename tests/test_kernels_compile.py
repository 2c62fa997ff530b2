"""Every kernel, in every variant that the heuristics choose, compiles; hot kernels keep everything in registers."""

from __future__ import annotations

import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest

from kernels_cuda import build
from kernels_cuda.heuristics import Variant, choose
from lora_server.transport import put

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


def compiled(name: str, code: str, variant: Variant) -> str:
    """What the assembler says of one file in one variant."""
    command = [str(NVCC), build.STANDARD, f"-gencode=arch=compute_{code},code=sm_{code}", "-cubin", "-Xptxas", "-v"]
    command += ["-Werror", "all-warnings", *variant.defines, "-x", "cu", "-", "-o", "/dev/null"]
    source = build.read_source(name, put.FILES)
    done = subprocess.run(command, input=source, text=True, capture_output=True, timeout=150)
    assert done.returncode == 0, f"{name} for sm_{code}: {done.stderr}"
    return done.stderr


@pytest.mark.skipif(NVCC is None, reason="needs nvcc")
def test_every_kernel_compiles_without_local_memory():
    files = sorted(path.name for path in build.SOURCE.glob("*.cu"))
    files.append("put.cu")
    jobs = [(name, code, choose(capability, shared)) for name in files for capability, code, shared in GPUS.values()]
    with ThreadPoolExecutor(2) as pool:
        logs = list(pool.map(lambda job: compiled(*job), jobs))
    kernels = set()
    for (name, code, variant), log in zip(jobs, logs, strict=True):
        found = USAGE.findall(log)
        assert found, log
        for kernel, *usage in found:
            stack, stores, loads, registers = map(int, usage)
            assert (stack, stores, loads) == (0, 0, 0), f"{name} {kernel} sm_{code} {variant}: {log}"
            assert registers * variant.warps * 32 <= 65536
            kernels.add(kernel)
    assert kernels >= {f"{kernel}_{dtype}" for kernel in build.KERNELS for dtype in build.DTYPES}


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
