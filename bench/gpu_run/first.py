"""Stage `first`: a GPU's first minute. A line for each question whose answer decides what the later stages are worth.

versions     driver, CUDA, torch, CuPy, MPS
registers    of the kernels that serve, put, wait and add, as they were loaded, and who finds no room beside whom
beside       which blocks begin within a millisecond beside a stand-in of the kernel that serves
streams      on how many of 64 streams a write waits while a kernel runs on another, with 8 and with 32 connections
slices       how long two processes that share the GPU run in turn
latencies    loads, fences, and a barrier of all blocks
headline     the cell of stage `headline`, 128 tokens
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.gpu_run import headline, probe, stage
from bench.gpu_run.record import Record
from bench.gpu_run.state import ROOT
from bench.kernels import measure
from kernels_cuda.residency import SERVE_WARPS, Block, fit
from lora_server.demo import children
from lora_server.transport.environment import ENVIRONMENT, prepare_environment

SOURCE = Path(__file__).with_name("first.cu")
HOLD_NS, SOON_NS = 300_000_000, 1_000_000
HOLDERS = {"hold_16": 16, "hold_64": 64, "hold_162": 162}
BESIDE = {  # kernel, blocks, threads: like a put, a wait of eight warps, a wait of one, and torch's fill
    "put": ("hold_64", 16, 256),
    "wait of 8 warps": ("hold_16", 1, 256),
    "wait of 1 warp": ("hold_16", 1, 32),
    "fill": ("hold_16", 16, 128),
}
STREAMS, WRITE_SECONDS = 64, 0.02
SPIN_NS, MOST_GAPS = 400_000_000, 4000
CHILD_SECONDS = 25.0


class Kernels:
    """Those of first.cu."""

    def __init__(self) -> None:
        import cupy

        self.cupy, self.module = cupy, cupy.RawModule(code=SOURCE.read_text(), options=("-std=c++17",))
        self.multiprocessors = int(cupy.cuda.Device(0).attributes["MultiProcessorCount"])
        self.words = cupy.zeros(2 + 2 * MOST_GAPS, cupy.uint64)
        self.floats = cupy.zeros(256, cupy.float32)

    def launch(self, name: str, blocks: int, threads: int, *values: object, stream: Any = None) -> None:
        """On a stream, by default the current one."""
        numbers = tuple(self.cupy.uint64(value) if isinstance(value, int) else value for value in values)
        with stream or self.cupy.cuda.get_current_stream():
            self.module.get_function(name)((blocks,), (threads,), numbers)

    def new_stream(self) -> Any:
        return self.cupy.cuda.Stream(non_blocking=True)

    def hold_everywhere(self, stream: Any) -> int:
        """A stand-in of the kernel that serves, on every multiprocessor; where it says when it began."""
        began = int(self.words.data.ptr)
        threads = 32 * (SERVE_WARPS + 1)
        self.launch("hold_162", self.multiprocessors, threads, began, self.floats.data.ptr, HOLD_NS, stream=stream)
        return began


def registers() -> dict[str, Any]:
    """Of each kernel as it was loaded; which of a client's do not fit beside which that serves."""
    import torch

    from lora_server.transport.gpu.cuda import ONE_WARP, CudaGpu
    from lora_server.transport.gpu.source import SERVES

    gpu = CudaGpu(torch.device("cuda", 0))
    of: dict[str, int] = {}
    for source in ("serve.cu", "link.cu", "put.cu"):
        gpu.compile(source)
    for kernel, source in gpu.kernels.items():
        if source in ("serve.cu", "link.cu", "put.cu"):
            of[kernel] = int(gpu._function(kernel).num_regs)
    shared = {source: gpu._shared_bytes(source) for source in set(gpu.kernels.values())}

    def block(kernel: str) -> Block:
        source = gpu.kernels[kernel]
        warps = 1 if kernel in ONE_WARP else gpu._variant(source).warps + (source in SERVES)
        return Block(warps, of[kernel], shared[source])

    serving = [kernel for kernel in of if gpu.kernels[kernel] in SERVES]
    crowded = [f"{one} beside {other}" for other in serving for one in of if not fit([block(other), block(one)])]
    return {**of, "no_room": [pair for pair in crowded if pair.split(" beside ")[0] not in serving]}


def beside() -> dict[str, Any]:
    """Microseconds until each begins beside the stand-in; where it does not, it begins behind its end."""
    kernels, found = Kernels(), dict[str, Any]()
    large, small = kernels.new_stream(), kernels.new_stream()
    for name, (kernel, blocks, threads) in BESIDE.items():
        own = kernels.words.data.ptr + 8
        for _ in range(2):  # the first loads the kernels
            kernels.hold_everywhere(large)
            kernels.launch(kernel, blocks, threads, own, kernels.floats.data.ptr, 1000, stream=small)
            kernels.cupy.cuda.Device(0).synchronize()
        stand_in, its = kernels.words[:2].get().tolist()
        found[name] = {"us": round((its - stand_in) / 1e3, 1), "beside": its - stand_in < HOLD_NS - SOON_NS}
    for holder, nearly in HOLDERS.items():
        found[holder] = {"registers": int(kernels.module.get_function(holder).num_regs), "of": nearly}
    return found


def stalled_streams() -> int:
    """Of 64 streams, those on which a write of one word waits while a kernel runs on another."""
    from cuda.bindings import driver

    kernels = Kernels()
    streams, busy = [kernels.new_stream() for _ in range(STREAMS)], kernels.new_stream()
    kernels.hold_everywhere(busy)
    busy.synchronize()
    kernels.hold_everywhere(busy)
    stalled = 0
    for stream in streams:
        driver.cuStreamWriteValue64(stream.ptr, kernels.words.data.ptr + 64, 1, 0)
        deadline = time.monotonic() + WRITE_SECONDS
        while not stream.done and time.monotonic() < deadline:
            pass
        stalled += not stream.done
        if busy.done:  # the rest would find the GPU idle
            kernels.hold_everywhere(busy)
    return stalled


def gaps() -> dict[str, Any]:
    """Of one process that spins on the GPU: how long others ran in between, and it itself."""
    kernels = Kernels()
    for _ in range(2):
        kernels.words.fill(0)
        kernels.launch("gaps", 1, 1, kernels.words.data.ptr, MOST_GAPS, SPIN_NS)
        kernels.cupy.cuda.Device(0).synchronize()
    words = kernels.words.get().tolist()
    count = words[0]
    begins, lengths = words[2 : 2 + 2 * count : 2], words[3 : 3 + 2 * count : 2]
    ran = [begins[i + 1] - begins[i] - lengths[i] for i in range(count - 1)]
    return {
        "gaps": count,
        "others_ran_us": round(statistics.median(lengths) / 1e3, 1) if lengths else None,
        "it_ran_us": round(statistics.median(ran) / 1e3, 1) if ran else None,
    }


ALONE: dict[str, Callable[[], Any]] = {"streams": stalled_streams, "gaps": gaps}  # what a process of its own finds


def _start(question: str, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "bench.gpu_run.first", "--record", os.devnull, "--alone", question]
    return children.start(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env={**os.environ, **environment})


def _answer(process: subprocess.Popen[str]) -> Any:
    try:
        said, _ = process.communicate(timeout=CHILD_SECONDS)
    finally:
        children.stop(process, 1.0)
    return json.loads(said.strip().splitlines()[-1])


def streams() -> dict[str, int]:
    """Stalled ones, by the number of connections."""
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    return {
        f"of {STREAMS}, {number} connections": _answer(_start("streams", **{name: number})) for number in ("8", "32")
    }


def slices() -> list[Any]:
    """What each of two processes finds that spin beside each other."""
    return [_answer(process) for process in [_start("gaps"), _start("gaps")]]


def latencies() -> dict[str, Any]:
    """Nanoseconds; `probe` has the single instructions."""
    kernels = Kernels()
    cupy, out = kernels.cupy, kernels.words.data.ptr

    def took(kernel: str, blocks: int, threads: int, *values: object, each: int) -> float:
        for _ in range(2):
            kernels.launch(kernel, blocks, threads, *values)
        cupy.cuda.Device(0).synchronize()
        return round(int(kernels.words[0].get()) / each, 1)

    found = {}
    for name, nbytes in (("load_from_l2", 1 << 20), ("load_from_memory", 1 << 30)):
        stride, steps = 4096 // 8, min(2000, nbytes // 4096)
        chain = cupy.zeros(nbytes // 8, cupy.uint64)
        places = cupy.random.permutation(nbytes // 4096)[:steps] * stride
        chain[0] = places[0]
        chain[places[:-1]] = places[1:]
        found[f"{name}_ns"] = took("chase", 1, 1, chain.data.ptr, steps - 1, out, each=steps - 1)
    lines = cupy.zeros(1 << 16, cupy.uint64)
    for count in (0, 128, 2048):
        found[f"fence_behind_{count}_stores_ns"] = took("fences", 1, 128, lines.data.ptr, count, 100, out, each=100)
    arrivals = cupy.zeros(1, cupy.uint64)
    for _ in range(2):
        arrivals.fill(0)
        kernels.launch("barriers", kernels.multiprocessors, 1, arrivals.data.ptr, 100, out)
    found["barrier_of_all_blocks_ns"] = round(int(kernels.words[0].get()) / 100, 1)
    return found


def versions() -> dict[str, Any]:
    """What is installed, and what else uses the GPU."""
    import cupy
    import torch

    says = ("nvidia-smi", "--query-gpu=name,driver_version,clocks.sm,clocks.mem,memory.used", "--format=csv,noheader")
    return {
        "gpu": probe.tool(says), "mps": probe.tool(probe.TOOLS["MPS"]), "torch": torch.__version__,
        "cuda": torch.version.cuda, "cupy": cupy.__version__, "python": sys.version.split()[0],
        **{name: os.environ.get(name) for name in ENVIRONMENT},
    }  # fmt: skip


def headline_cell(record: Record) -> dict[str, Any]:
    """128 tokens, two draws."""
    import torch

    gpu = measure.Gpu(torch.device("cuda", 0))
    good = headline.cell(record, gpu, headline.adapters_on(gpu), 128, num_draws=2)
    (found,) = record.find("headline", tokens=128)[-1:]
    return {**{name: value for name, value in found.items() if name != "kind"}, "right": good}


def check(*_: object) -> None:
    """That what is launched is there. Raises ValueError."""
    text = SOURCE.read_text()
    launched = {*HOLDERS, *(kernel for kernel, *_ in BESIDE.values()), "gaps", "chase", "fences", "barriers"}
    for kernel in launched:
        if f"void {kernel}(" not in text:
            raise ValueError(f"{SOURCE.name} has no kernel {kernel}")


def work(record: Record, arguments: argparse.Namespace) -> bool:
    """A line each, printed as it comes; whether the headline cell is right, and every client's kernel finds room."""
    if arguments.alone:
        print(json.dumps(ALONE[arguments.alone]()))
        return True
    questions: dict[str, Callable[[], Any]] = {
        "versions": versions, "registers": registers, "beside": beside, "streams": streams, "slices": slices,
        "latencies": latencies, "headline": lambda: headline_cell(record),
    }  # fmt: skip
    found = {}
    for name, question in questions.items():
        began = time.monotonic()
        found[name] = probe.attempt(question)
        record.add("first", question=name, answer=found[name], seconds=round(time.monotonic() - began, 1))
        print(f"{name}: {json.dumps(found[name])}", flush=True)
    right = isinstance(found["headline"], dict) and found["headline"]["right"]
    return right and isinstance(found["registers"], dict) and not found["registers"]["no_room"]


if __name__ == "__main__":
    own = stage.parser(__doc__)
    own.add_argument("--alone", choices=ALONE, help="answer one question in this process, as JSON")
    prepare_environment()
    stage.main(work, own.parse_args(), modules=("cupy", "cuda.bindings"), check=check)
