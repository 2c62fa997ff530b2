"""Stage `inproc`: a kernel that serves and its client, in one process, each on multiprocessors of its own.

No other process uses the GPU, so it has no time slices, and these are times of the persistent path: put, answer, add
in a CUDA graph, by the GPU's clock. The kernel that serves lacks the client's multiprocessors (100 of 132 are left on
an H200), so its times are upper bounds of those on a GPU of its own.

16 rows      one adapter at one dense site
N tokens     the cell of stage `headline`: gate_up and down of one layer on one shard of EP4, 512 adapters
`us` is with a cold L2, `warm_us` with one step right after the other; put_us, answer_us and add_us are of a second
graph, which has stamps.
steps        many in a row, while another thread loads and drops an adapter; the last answer has the first one's bits

A rehearsal runs on this CPU, with the emulator's kernels.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.gpu_run import probe, stage
from bench.gpu_run.inproc_weights import ATTENTION, Files, attention, expert, spec_of
from bench.gpu_run.local_shard import LocalShard
from bench.gpu_run.one_cell import MOST_ERROR
from bench.gpu_run.record import Checks, Record
from bench.gpu_run.served import CAPTURE, timed_us
from bench.gpu_run.stamps import Stamps
from bench.kernels.draws import Draw, draw
from bench.kernels.measure import SAMPLES, SEED
from bench.kernels.models import MODELS, NUM_ADAPTERS, Model
from bench.kernels.ours import relative_error
from bench.kernels.timing import Flush
from client_connector.packing import Window
from client_connector.serving.launches import header_of
from kernels_cuda.layout import PAGE_BYTES
from kernels_cuda.routing import Choice, Route
from lora_server.device.client.captured import Captured, CapturedSite
from lora_server.device.protocol.gpu import Gpu
from lora_server.placement import Layout, Placement
from lora_server.spec import Site
from lora_server.transport.environment import prepare_environment
from lora_server.wire import slot

CLIENTS = 32  # multiprocessors: the others serve
SHARDS, ROWS = 4, 16
SECONDS = 10.0  # for one step
TARGET_US = {128: 100.0, 256: 160.0}  # through the persistent path, on a GPU of its own
QKV, GATE_UP, DOWN = (Site(0, projection) for projection in ("qkv", "gate_up", "down"))
SMALL = Model("small", 64, 96, 8, 2, 16)
SIZES = {MODELS["mixtral-8x7b"].name: (MODELS["mixtral-8x7b"], 128), SMALL.name: (SMALL, 16)}  # and a head's width


@dataclass
class Part:
    """One site of a cell. `y` has its results: a row per token, or (gate_up) per token and expert."""

    site: Site
    launches: CapturedSite
    choice: Choice
    x: torch.Tensor
    y: torch.Tensor

    def run(self, stamp: Callable[[], None] | None = None) -> None:
        """Launch put, wait and add; with `stamp`, a stamp behind each."""
        self.launches.put(self.choice)
        if stamp is not None:
            stamp()
        self.launches.wait()
        if stamp is not None:
            stamp()
        self.launches.add(self.y)
        if stamp is not None:
            stamp()

    def delta(self, files: Files, drawn: Draw, result: int, own: range) -> torch.Tensor | None:
        """Compute row `result` of y in float64; None for a row that this shard adds nothing to."""
        top_k = drawn.experts_Tk.shape[1]
        if self.site == QKV:
            return files.delta(int(drawn.adapters_T[result]), [attention(name) for name in ATTENTION], self.x[result])
        pairs = [result] if self.site == GATE_UP else range(result * top_k, (result + 1) * top_k)
        experts = {pair: int(drawn.experts_Tk.flat[pair]) for pair in pairs}
        found = []
        for pair, index in experts.items():
            if index not in own:
                continue
            token, names, weight = pair // top_k, ["w1", "w3"], 1.0
            if self.site == DOWN:
                names, weight = ["w2"], float(drawn.weights_Tk.flat[pair])
            modules, x = [expert(index, name) for name in names], self.x[pair if self.site == DOWN else token]
            found.append(weight * files.delta(int(drawn.adapters_T[token]), modules, x))
        return torch.stack(found).sum(0) if found else None


class Cell:
    """Sites that follow each other in one step, on one link, with inputs where graphs find them."""

    def __init__(self, its: Setting, name: str, sites: tuple[Site, ...], drawns: list[Draw]) -> None:
        self.its, self.name, self.drawns = its, name, drawns
        tokens, top_k = drawns[0].experts_Tk.shape
        device, self.link = its.gpu.device, its.shard.connect(its.handles.values())
        self.captured = Captured(self.link)
        route = Route.empty(tokens * top_k, device, max_rows=tokens * top_k)
        self._inputs = [torch.from_numpy(array).to(device) for array in drawns[0]]
        experts_Tk, weights_Tk, adapters_T = self._inputs
        generator = torch.Generator().manual_seed(SEED)
        self.parts = []
        for site in sites:
            by_entry, dense, width = site == DOWN, site == QKV, its.spec.in_width(site)
            header = header_of(
                site, slot.DTYPES.index("bfloat16"), width, by_entry, Window(0, ((0, its.spec.out_width(site)),))
            )
            x = torch.randn(tokens * top_k if by_entry else tokens, width, generator=generator).bfloat16().to(device)
            among = (1, None) if dense else (its.spec.experts, its.experts)
            choice = Choice(experts_Tk, weights_Tk if by_entry else None, adapters_T, its.directory, *among)
            shape = tokens if by_entry else tokens * top_k, its.spec.out_width(site)
            y = torch.zeros(shape, dtype=torch.bfloat16, device=device)
            self.parts.append(Part(site, self.captured.site(header, x, route, by_entry), choice, x, y))
        self.captured.begin(SECONDS)

    def run(self) -> None:
        """Launch a step."""
        for part in self.parts:
            part.run()

    def feed(self, drawn: Draw) -> None:
        """The next steps are this draw's."""
        for tensor, array in zip(self._inputs, drawn, strict=True):
            tensor.copy_(torch.from_numpy(array))

    def answers(self, step: Callable[[], object]) -> list[torch.Tensor]:
        """Run one step on zeros; return its results on the host. Raises the step's error."""
        for part in self.parts:
            part.y.zero_()
        step()
        found = [part.y.to("cpu", copy=True) for part in self.parts]
        self.captured.finish()
        return found

    def error(self, drawn: Draw, step: Callable[[], object], seed: int) -> float:
        """The largest relative error of sampled rows; infinite where a row has something that it must not have."""
        self.feed(drawn)
        worst, random = 0.0, np.random.default_rng(seed)
        for part, y in zip(self.parts, self.answers(step), strict=True):
            host = Part(part.site, part.launches, part.choice, part.x.cpu(), y)
            for result in random.choice(len(y), min(SAMPLES, len(y)), replace=False):
                wanted = host.delta(self.its.files, drawn, int(result), self.its.experts)
                if wanted is None:
                    worst = max(worst, float("inf") if y[result].any() else 0.0)
                else:
                    worst = max(worst, relative_error(y[result], wanted))
        return worst


class Setting:
    """The parts that all cells share: the shard, its adapters, and the place where graphs are replayed."""

    def __init__(self, scratch: Path, gpu: Gpu, given: argparse.Namespace) -> None:
        model, head_dim = SIZES[given.model]
        self.gpu, self.spec = gpu, spec_of(model, head_dim)
        self.tokens = [int(count) for count in given.tokens.split(",")]
        self.drawns = {count: [draw(model, count, seed) for seed in range(given.draws)] for count in self.tokens}
        placement = Placement(self.spec, Layout(SHARDS, 1))
        self.experts = placement.experts(GATE_UP, 0)
        if not placement.experts(QKV, 0):
            raise ValueError(f"{QKV} belongs to shard {placement.owners(QKV)[0]}, expected 0")
        self.files = Files(scratch, self.spec, self.experts, model.lora_rank, given.files)
        adapters = sorted({0, *(int(one) for found in self.drawns.values() for d in found for one in d.adapters_T)})
        pages = (len(adapters) + 2) * (-(-self.files.nbytes // PAGE_BYTES) + 2)  # one is loaded beside them
        rows = max(ROWS, *(count * self.spec.top_k for count in self.tokens))
        self.shard = LocalShard(scratch, gpu, placement, rows=rows, pages=pages)
        began = time.monotonic()
        self.handles = {adapter: self.shard.load(self.files.path(adapter)) for adapter in adapters}
        self.load_seconds = time.monotonic() - began
        directory = torch.zeros(NUM_ADAPTERS, 3, dtype=torch.int32)
        for adapter, handle in self.handles.items():
            directory[adapter] = torch.tensor([handle, 0, 1])  # a segment names a handle and an expert
        self.directory = directory.to(gpu.device)

    @contextlib.contextmanager
    def cell(self, tokens: int) -> Iterator[Cell]:
        """One with a link of its own, closed at the end; 0: rows of one adapter at a dense site."""
        if tokens:
            cell = Cell(self, f"EP4, {tokens} tokens", (GATE_UP, DOWN), self.drawns[tokens])
        else:
            own = Draw(np.zeros((ROWS, 1), np.int32), np.ones((ROWS, 1), np.float32), np.zeros(ROWS, np.int32))
            cell = Cell(self, f"{ROWS} rows", (QKV,), [own])
        try:
            yield cell
        finally:
            cell.link.close()


def captured(device: torch.device, work: Callable[[], None]) -> Callable[[], object]:
    """Return the replay of `work` as a CUDA graph; on a CPU, `work`.

    torch.cuda.graph would wait for the whole GPU first, of which the kernel that serves is a part.
    """
    if device.type != "cuda":
        return work
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(capture_error_mode=CAPTURE)
    try:
        work()
    finally:  # or nothing else could be captured on this stream
        graph.capture_end()
    return graph.replay


def stamped(cell: Cell, rounds: int) -> dict[str, float]:
    """Median microseconds of put, answer and add, over all sites of a step."""
    stamps = Stamps(cell.link)

    def step() -> None:
        stamps.take()
        for part in cell.parts:
            part.run(stamps.take)

    play, device = captured(cell.link.device, step), cell.link.device
    sums = []
    for _ in range(rounds):
        timed_us(device, play)
        sums.append(np.array(stamps.spans_us()).reshape(len(cell.parts), 3).sum(0))
    cell.captured.finish()
    return dict(zip(("put_us", "answer_us", "add_us"), np.median(sums, 0).round(2).tolist(), strict=True))


def measure(record: Record, cell: Cell, tokens: int, flush: Callable[[], None], given: argparse.Namespace) -> float:
    """Record one cell's times and its largest error, which is returned."""
    device = cell.link.device
    cell.feed(cell.drawns[0])
    cell.run()  # loads whatever is left to load
    step, cold, warm, errors = captured(device, cell.run), list[float](), list[float](), list[float]()
    for seed, drawn in enumerate(cell.drawns):
        errors.append(cell.error(drawn, step, seed))
        for times, before in ((cold, flush), (warm, lambda: None)):
            for _ in range(given.rounds):
                before()
                times.append(timed_us(device, step))
        cell.captured.finish()
    cold.sort()
    parts = probe.attempt(lambda: stamped(cell, given.rounds))
    facts = parts if isinstance(parts, dict) else {"reason": parts}
    record.add(
        "inproc", cell=cell.name, us=round(statistics.median(cold), 2), p95_us=round(cold[int(0.95 * len(cold))], 2),
        warm_us=round(statistics.median(warm), 2), **facts, target_us=TARGET_US.get(tokens), max_rel_err=max(errors),
    )  # fmt: skip
    return max(errors)


class Churn:
    """A thread that loads and drops an adapter again and again."""

    def __init__(self, its: Setting) -> None:
        self._its, self._stop, self.seconds = its, threading.Event(), list[float]()
        self.problem: Exception | None = None
        self._thread = threading.Thread(target=self._run, daemon=True, name="churn")
        self._thread.start()

    def _run(self) -> None:
        shard, path = self._its.shard, self._its.files.path(1)
        try:
            while not self._stop.is_set():
                began = time.monotonic()
                handle = shard.load(path)
                self.seconds.append(time.monotonic() - began)
                shard.drop(handle)
        except Exception as problem:
            self.problem = problem

    def end(self) -> None:
        """Raises what went wrong, TimeoutError if it does not end."""
        self._stop.set()
        self._thread.join(SECONDS)
        if self._thread.is_alive():
            raise TimeoutError(f"a load or a drop beside steps did not end within {SECONDS:g} s")
        if self.problem is not None:
            raise self.problem


def endure(record: Record, cell: Cell, given: argparse.Namespace) -> bool:
    """Many steps while an adapter is loaded and dropped; whether the answer stays the same, bit for bit."""
    device = cell.link.device
    step = captured(device, cell.run)
    cell.feed(cell.drawns[0])
    first, churn, times = cell.answers(step), Churn(cell.its), list[float]()
    try:
        while len(times) < given.steps or not churn.seconds:
            if churn.problem is not None:
                break
            times.append(timed_us(device, step))
    finally:
        churn.end()
    same = all(torch.equal(a, b) for a, b in zip(first, cell.answers(step), strict=True))
    times.sort()
    record.add(
        "steps", cell=cell.name, steps=len(times), us=round(statistics.median(times), 2),
        p99_us=round(times[int(0.99 * len(times))], 2), longest_us=round(times[-1], 2), loads=len(churn.seconds),
        load_ms=round(1e3 * statistics.median(churn.seconds), 2),
    )  # fmt: skip
    return same


def open_gpu(given: argparse.Namespace) -> tuple[Gpu, Callable[[], None], dict[str, int]]:
    """The GPU, how to empty its L2, and which multiprocessors serve. Every kernel is loaded before one serves."""
    if given.gpu:
        return importlib.import_module(given.gpu).use(), lambda: None, {}
    from kernels_cuda.cuda import on_device
    from lora_server.device.protocol.cuda import CudaGpu
    from lora_server.device.protocol.needs import check

    device = torch.device("cuda", 0)
    check(device)
    of = torch.cuda.get_device_properties(device).multi_processor_count
    with on_device(device):
        gpu = CudaGpu(device, multiprocessors=of - CLIENTS)
    for source in sorted(set(gpu.kernels.values())):
        gpu.compile(source)
    return gpu, Flush(device), {"serving": of - CLIENTS, "multiprocessors": of}


def work(record: Record, given: argparse.Namespace) -> bool:
    """Whether every answer is right; times are only written down."""
    torch.set_grad_enabled(False)
    gpu, flush, facts = open_gpu(given)
    own = torch.cuda.stream(torch.cuda.Stream(gpu.device)) if gpu.device.type == "cuda" else contextlib.nullcontext()
    checks = Checks(record)
    with tempfile.TemporaryDirectory(prefix="lora-inproc-") as scratch, own:
        its = Setting(Path(scratch), gpu, given)
        try:
            gbytes = its.files.nbytes * len(its.handles) / 1e9
            record.add(
                "setting", **facts, model=given.model, adapters=len(its.handles), gbytes=round(gbytes, 2),
                load_seconds=round(its.load_seconds, 1),
            )  # fmt: skip
            for tokens in (0, *its.tokens):
                with its.cell(tokens) as cell:
                    error = measure(record, cell, tokens, flush, given)
                    checks.judge(f"{cell.name}: sampled rows", error < MOST_ERROR)
                    checks.judge(f"{cell.name}: the same bits after many steps", endure(record, cell, given))
                its.shard.check()
        finally:
            its.shard.close()
    return checks.good


# where the GPU is a CPU: the tests' GPU for this process
EMULATED: dict[str, Any] = {
    "gpu": "tests.support.gpu.emulated_gpu", "model": SMALL.name, "tokens": "8", "draws": 1, "files": 2, "rounds": 2,
    "steps": 10,
}  # fmt: skip


def rehearse(record: Record, given: argparse.Namespace) -> None:
    """Plays on this CPU."""
    if given.rehearse:
        stage.play_emulated(work, record, given, **EMULATED)


def parser() -> argparse.ArgumentParser:
    """Make the parser of the stage's command line."""
    own = stage.parser(__doc__)
    own.add_argument("--gpu", default="", help="a module that makes this process's CPU a GPU")
    own.add_argument("--model", default="mixtral-8x7b", choices=SIZES)
    own.add_argument("--tokens", default="128,256", help="of the cells on one shard of EP4")
    own.add_argument("--draws", type=int, default=4, help="of each")
    own.add_argument("--files", type=int, default=8, help="adapters on disk, loaded under as many handles as are drawn")
    own.add_argument("--rounds", type=int, default=100, help="of each draw, cold and warm")
    own.add_argument("--steps", type=int, default=1000, help="of each cell, beside loads")
    return own


if __name__ == "__main__":
    prepare_environment()
    stage.main(work, parser().parse_args(), modules=("cupy", "cuda.bindings"), check=rehearse)
