"""Stage `first`: what decides how other stages' figures are to be read, a line for each fact.

versions     driver, CUDA, torch, CuPy, MPS
beside       which kernels begin while a stand-in of the kernel that serves runs, and how long after it
streams      on how many of 64 streams a write waits while a kernel runs on another, with 8 and with 32 connections
slices       how long two processes that share the GPU run in turn
latencies    loads, fences, and a barrier of all blocks
registers    of the kernels that serve, put, wait and add, as they were loaded; which do not fit beside one that serves
headline     the cell of stage `headline`, 128 tokens

Other processes compile the kernels of the last two lines in the meantime.
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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench.gpu_build import SERVE_SHARED_BYTES
from bench.gpu_run import headline, probe, registers, stage
from bench.gpu_run.record import Record
from bench.gpu_run.state import ROOT
from bench.kernels import measure
from kernels_cuda.residency import SERVE_WARPS
from lora_server.demo import children
from lora_server.transport.environment import ENVIRONMENT, prepare_environment

SOURCE = Path(__file__).with_name("first.cu")
HOLD_NS = 300_000_000
HOLDERS = {"hold_16": 16, "hold_64": 64, "hold_162": 162}
BESIDE = {  # kernel, blocks, threads: like a put, a wait of eight warps, a wait of one, and torch's fill
    "put": ("hold_64", 16, 256),
    "wait of 8 warps": ("hold_16", 1, 256),
    "wait of 1 warp": ("hold_16", 1, 32),
    "fill": ("hold_16", 16, 128),
}
STREAMS, WRITE_SECONDS = 64, 0.02
SPIN_NS, MOST_GAPS = 400_000_000, 4000
CHAIN_BYTES, LINE_BYTES, CHAIN_STEPS = 1 << 30, 4096, 2000
CHILD_SECONDS = 25.0


class Kernels:
    """The probe kernels of first.cu."""

    def __init__(self) -> None:
        import cupy

        self.cupy, self.module = cupy, cupy.RawModule(code=SOURCE.read_text(), options=("-std=c++17",))
        self.multiprocessors = int(cupy.cuda.Device(0).attributes["MultiProcessorCount"])
        self.words = cupy.zeros(2 + 2 * MOST_GAPS, cupy.uint64)
        self.floats = cupy.zeros(256, cupy.float32)

    def launch(
        self, name: str, blocks: int, threads: int, *values: int, stream: Any = None, shared_bytes: int = 0
    ) -> None:
        """Launch a kernel on a stream, by default the current one."""
        function, numbers = self.module.get_function(name), tuple(self.cupy.uint64(value) for value in values)
        if shared_bytes:
            function.max_dynamic_shared_size_bytes = shared_bytes
        with stream or self.cupy.cuda.get_current_stream():
            function((blocks,), (threads,), numbers, shared_mem=shared_bytes)

    def new_stream(self) -> Any:
        return self.cupy.cuda.Stream(non_blocking=True)

    def hold_everywhere(self, stream: Any) -> None:
        """A stand-in of the kernel that serves, on every multiprocessor; words[0]: when its last block began."""
        values = (int(self.words.data.ptr), int(self.floats.data.ptr), HOLD_NS)
        threads, shared = 32 * (SERVE_WARPS + 1), SERVE_SHARED_BYTES
        self.launch("hold_162", self.multiprocessors, threads, *values, stream=stream, shared_bytes=shared)


def beside() -> dict[str, Any]:
    """Microseconds after the stand-in's last block until the last block of each begins; if it cannot run beside it, it
    starts after it ends."""
    kernels, found = Kernels(), dict[str, Any]()
    large, small = kernels.new_stream(), kernels.new_stream()
    for name, (kernel, blocks, threads) in BESIDE.items():
        own = kernels.words.data.ptr + 8
        for _ in range(2):  # the first loads the kernels
            kernels.words[:2] = 0
            kernels.cupy.cuda.Device(0).synchronize()
            kernels.hold_everywhere(large)
            kernels.launch(kernel, blocks, threads, own, int(kernels.floats.data.ptr), 1000, stream=small)
            kernels.cupy.cuda.Device(0).synchronize()
        stand_in, its = (int(word) for word in kernels.words[:2].get())
        found[name] = {"us": round((its - stand_in) / 1e3, 1), "beside": its - stand_in < HOLD_NS}
    for holder, target in HOLDERS.items():
        found[holder] = {"registers": int(kernels.module.get_function(holder).num_regs), "target": target}
    return found


def stalled_streams() -> int:
    """Count the streams, of 64, on which a write of one word waits while a kernel runs on another stream."""
    from cuda.bindings import driver

    kernels = Kernels()
    streams, busy = [kernels.new_stream() for _ in range(STREAMS)], kernels.new_stream()
    kernels.hold_everywhere(busy)  # loads it
    busy.synchronize()
    kernels.hold_everywhere(busy)
    began, stalled = time.monotonic(), 0
    for stream in streams:
        probe.checked(driver.cuStreamWriteValue64(stream.ptr, int(kernels.words.data.ptr) + 64, 1, 0))
        deadline = time.monotonic() + WRITE_SECONDS
        while not stream.done and time.monotonic() < deadline:
            pass
        stalled += not stream.done
        if time.monotonic() - began > HOLD_NS / 2e9:  # no write may find the GPU idle
            busy.synchronize()
            kernels.hold_everywhere(busy)
            began = time.monotonic()
    return stalled


def gaps() -> dict[str, Any]:
    """Spin on the GPU; return how long other processes ran in between, and how long this one did."""
    kernels = Kernels()
    for nanoseconds in (1000, SPIN_NS):  # the first loads it
        kernels.words.fill(0)
        kernels.launch("gaps", 1, 1, int(kernels.words.data.ptr), MOST_GAPS, nanoseconds)
        kernels.cupy.cuda.Device(0).synchronize()
        if nanoseconds != SPIN_NS:
            print("ready", flush=True)
            sys.stdin.readline()  # until the other one is, too
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
    """A process that answers it, once a line came on its stdin if it says that it is ready."""
    command = [sys.executable, "-m", "bench.gpu_run.first", "--record", os.devnull, "--alone", question]
    return children.start(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env={**os.environ, **environment}
    )


def _answer(process: subprocess.Popen[str]) -> Any:
    try:
        said, _ = process.communicate("\n", timeout=CHILD_SECONDS)
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
    """Run `gaps` in two processes beside each other; return the findings of each."""
    both = [_start("gaps"), _start("gaps")]
    try:
        for process in both:
            assert process.stdout is not None
            process.stdout.readline()
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(_answer, both))
    finally:
        for process in both:
            children.stop(process, 1.0)


def latencies() -> dict[str, Any]:
    """Nanoseconds; `probe` has the single instructions."""
    kernels = Kernels()
    cupy, out = kernels.cupy, int(kernels.words.data.ptr)

    def took(kernel: str, threads: int, *values: int, each: int) -> float:
        kernels.launch(kernel, 1, threads, *values)
        cupy.cuda.Device(0).synchronize()
        return round(int(kernels.words[0].get()) / each, 1)

    found = {}
    chain = cupy.zeros(CHAIN_BYTES // 8, cupy.uint64)
    places = (1 + cupy.random.permutation(CHAIN_BYTES // LINE_BYTES - 1)[:CHAIN_STEPS]) * (LINE_BYTES // 8)
    chain[0] = places[0]
    chain[places[:-1]] = places[1:]
    for name in ("load_from_memory_ns", "load_from_l2_ns"):  # the second finds what the first brought
        flushed = cupy.zeros(CHAIN_BYTES // 8, cupy.uint64).sum() if "memory" in name else None
        cupy.cuda.Device(0).synchronize()
        found[name] = took("chase", 1, int(chain.data.ptr), CHAIN_STEPS, out, each=CHAIN_STEPS)
        del flushed
    lines = cupy.zeros(1 << 16, cupy.uint64)
    for count in (0, 128, 2048):
        for _ in range(2):  # the first loads it
            found[f"fence_after_{count}_stores_ns"] = took(
                "fences", 128, int(lines.data.ptr), count, 100, out, each=100
            )
    arrivals = cupy.zeros(1, cupy.uint64)
    for _ in range(2):
        arrivals.fill(0)
        kernels.launch("barriers", kernels.multiprocessors, 1, int(arrivals.data.ptr), 100, out)
    found["barrier_of_all_blocks_ns"] = round(int(kernels.words[0].get()) / 100, 1)
    return found


def versions() -> dict[str, Any]:
    """Read the versions of what is installed, and what else uses the GPU."""
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
    """Check that first.cu defines every kernel that is launched here. Raises ValueError."""
    text = SOURCE.read_text()
    launched = {*HOLDERS, *(kernel for kernel, *_ in BESIDE.values()), "gaps", "chase", "fences", "barriers"}
    for kernel in launched:
        if f"void {kernel}(" not in text:
            raise ValueError(f"{SOURCE.name} has no kernel {kernel}")


def work(record: Record, arguments: argparse.Namespace) -> bool:
    """A line each, as it comes; whether all were answered, the headline cell is right, and every kernel fits."""
    if arguments.alone:
        print(json.dumps(ALONE[arguments.alone]()))
        return True
    questions: dict[str, Callable[[], Any]] = {
        "versions": versions, "beside": beside, "streams": streams, "slices": slices, "latencies": latencies,
        "registers": registers.of_serving, "headline": lambda: headline_cell(record),
    }  # fmt: skip
    found = {}
    with ThreadPoolExecutor() as pool:
        compiling = [pool.submit(probe.compile_one, name) for name in probe.NEEDED_FIRST]
        for name, question in questions.items():
            began = time.monotonic()
            if name == "registers":
                record.add("compiled", modules=[future.result() for future in compiling])
            found[name] = probe.attempt(question)
            record.add("first", question=name, answer=found[name], seconds=round(time.monotonic() - began, 1))
            print(f"{name}: {json.dumps(found[name])}", flush=True)
    if any(isinstance(answer, str) for answer in found.values()):
        return False
    return found["headline"]["right"] and not found["registers"]["no_room"]


if __name__ == "__main__":
    own = stage.parser(__doc__)
    own.add_argument("--alone", choices=ALONE, help="answer one question in this process, as JSON")
    prepare_environment()
    stage.main(work, own.parse_args(), modules=("cupy", "cuda.bindings"), check=check)
