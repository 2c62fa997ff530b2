"""One engine of `lora-server profile`: `python -m lora_server.demo.profiled_engine`.

The first line of stdin is the job. Before each cell the engine writes a line, and begins when it reads one, so that
engines that are measured together begin together. The last line of stdout is the result.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import msgspec
import torch

from client_connector.exchange import GemmTimes
from lora_server import logs
from lora_server.demo.engine import Sequence, Stopwatch, Times, generate, load_model
from lora_server.spec import Site


class Cell(msgspec.Struct):
    """A batch that is generated `repeats` times: one token each measures its prompts, more its decode steps."""

    batch: list[Sequence]
    new_tokens: int
    repeats: int = 1


class ProfileJob(msgspec.Struct):
    """The cells, and adapters that are loaded in turn, of which the server holds only some at a time."""

    model: str
    server: str
    transport: str
    cells: list[Cell]
    loads: list[str] = []


class ProfileTimes(msgspec.Struct):
    """Times of each cell, and of loading an adapter."""

    cells: list[Times]
    load_us: float


def run(job: ProfileJob, together: Callable[[], None]) -> ProfileTimes:
    """Measure every cell; `together` is called before each."""
    from client_connector.transformers import attach

    model, found = load_model(job.model), list[Times]()
    with attach(model, server=job.server, transport=job.transport) as lora:
        for cell in job.cells:
            watch = Stopwatch()
            _generate(lora, model, cell, 1)  # warm up
            together()
            with _observed(lora, model, watch, cell):
                _generate(lora, model, cell, cell.repeats)
            found.append(watch.medians(decode=cell.new_tokens > 1))
        return ProfileTimes(found, _load_us(lora, job.loads))


def _generate(lora: Any, model: torch.nn.Module, cell: Cell, repeats: int) -> None:
    for _ in range(repeats):
        with lora.adapters([sequence.adapter for sequence in cell.batch]):
            generate(model, cell.batch, cell.new_tokens)


@contextlib.contextmanager
def _observed(lora: Any, model: Any, watch: Stopwatch, cell: Cell) -> Iterator[None]:
    """Let `watch` see what the block computes; of the base model, the experts of each layer as one GEMM."""
    if cell.batch[0].adapter is not None:
        lora.observe(watch.step, watch.gemm)
        yield
        lora.observe(None)
        return
    began_ns = [0]

    def before(module: torch.nn.Module, given: Any) -> None:
        began_ns[0] = time.monotonic_ns()

    def after(module: torch.nn.Module, given: Any, out: torch.Tensor, layer: int) -> None:
        decode = cell.new_tokens > 1 and len(given[0]) == len(cell.batch)
        watch.gemm(GemmTimes(Site(layer, "gate_up"), decode, began_ns[0], time.monotonic_ns()))

    with contextlib.ExitStack() as hooks:
        for layer, block in enumerate(model.base_model.layers):
            if layer in lora.client.terms.spec.moe_layers:
                experts = block.get_submodule("mlp.experts")
                hooks.callback(experts.register_forward_pre_hook(before).remove)
                hooks.callback(experts.register_forward_hook(partial(after, layer=layer)).remove)
        yield


def _load_us(lora: Any, names: list[str]) -> float:
    """Return what loading an adapter adds to holding one that is loaded; in the second round, from host memory."""
    loaded, held = list[int](), list[int]()
    for name in [*names, *names]:
        for times_ns in (loaded, held):
            began_ns = time.monotonic_ns()
            with lora.adapters([name], wait="loaded"):
                times_ns.append(time.monotonic_ns() - began_ns)
    again = loaded[len(names) :]
    return (statistics.median(again) - statistics.median(held)) / 1e3 if names else 0.0


def main() -> None:
    """Entry point of the process."""
    logs.configure()  # stdout is for the result
    torch.set_grad_enabled(False)
    torch.set_num_threads(1)

    def say(line: bytes) -> None:
        sys.stdout.buffer.write(line + b"\n")
        sys.stdout.buffer.flush()

    def together() -> None:
        say(b"ready")
        sys.stdin.buffer.readline()

    say(msgspec.json.encode(run(msgspec.json.decode(sys.stdin.buffer.readline(), type=ProfileJob), together)))


if __name__ == "__main__":
    main()
