"""Stage `passes`: a serving engine's pass as launches, in a CUDA graph that is captured once, with no adapter's rows.

replayed     passes of other adapters, rows and routes, against a host's exchanges over shared memory, bit for bit
eager        the same launches in no graph
base rows    a replay that sends nothing
times        of a replay, with adapters and without, by events of the GPU
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from bench.gpu_run import stage
from bench.gpu_run.lab import open_lab
from bench.gpu_run.record import Checks, Record
from bench.gpu_run.served import CAPTURE, note, timed_us
from client_connector.client import Client
from client_connector.packing import Window
from client_connector.remote import RemoteServer
from client_connector.serving.experts import RemoteExperts
from client_connector.serving.launched import LaunchedPass
from client_connector.serving.linear import RemoteLinear
from client_connector.serving.plan import Assigned, StepPlan
from client_connector.serving.planned import PlannedPass
from lora_server.spec import ModelSpec, Site

ROWS, TOP_K, LAYER, SEED = 24, 2, 1, 5
SECONDS = 20.0
BATCHES: tuple[tuple[str | None, ...], ...] = (("a",), ("b", None, "a"), ("a", "b"), (None, "b", None, None))
Names = Sequence[str | None]


class Layer:
    """A layer's sites, with inputs and results at fixed addresses. `scale` is the factor of the engine's own weight."""

    def __init__(self, spec: ModelSpec, forward: PlannedPass, rows: int, device: str, scale: float = 1.0) -> None:
        hidden, ffn, site = spec.hidden, spec.ffn, Site(LAYER, "qkv")
        self.forward, self._experts = forward, spec.experts
        self.linear = RemoteLinear(forward, site, Window(0, ((0, spec.out_width(site)),)))
        halves = Window(0, ((0, ffn), (ffn, 2 * ffn)))
        self.experts = RemoteExperts(forward, LAYER, halves, Window(0, ((0, hidden),)), ffn)
        generator = torch.Generator().manual_seed(SEED)
        weight = scale * torch.randn(spec.out_width(site), hidden, generator=generator)
        self.weight = weight.to(device, torch.bfloat16)

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.bfloat16, device=device)

        self.x, self.act = zeros(rows, hidden), zeros(rows * TOP_K, ffn)
        self.ids = torch.zeros(rows, TOP_K, dtype=torch.int32, device=device)
        self.weights = torch.zeros(rows, TOP_K, device=device)
        self.qkv, self.up, self.down = (
            zeros(rows, spec.out_width(site)),
            zeros(rows * TOP_K, 2 * ffn),
            zeros(rows, hidden),
        )

    def feed(self, seed: int) -> None:
        """Other activations, and another choice of experts."""
        generator = torch.Generator().manual_seed(seed)
        for into in (self.x, self.act, self.weights):
            into.copy_(torch.randn(into.shape, generator=generator))
        chosen = [torch.randperm(self._experts, generator=generator)[:TOP_K] for _ in range(len(self.x))]
        self.ids.copy_(torch.stack(chosen).int())

    def run(self) -> None:
        """A pass, or its part of a graph."""
        self.linear.push(self.x)
        torch.mm(self.x, self.weight.T, out=self.qkv)
        self.linear.add(self.qkv)
        step = self.experts.start_gate_up(self.x, self.ids, None)
        self.up.zero_()
        self.experts.finish_gate_up(step, self.up)
        step = self.experts.start_down(self.act, self.ids, self.weights, None)
        self.down.zero_()
        self.experts.finish_down(step, self.down)

    def results(self) -> list[torch.Tensor]:
        """Copies, on the host."""
        return [one.to("cpu", copy=True) for one in (self.qkv, self.up, self.down)]


def begin(forward: PlannedPass, names: Names, rows: int, merged: str | None = None) -> None:
    """A pass of one request per name, with as many rows each; None is the base model's.

    Adapters are held anew, once they are loaded, as a serving engine has them. `merged`: the adapter in the base
    weights, of which rows need nothing.
    """
    wanted = sorted({name for name in (*names, merged) if name is not None})
    held = {one.name: one for one in forward.client.acquire(wanted, loaded=True)} if wanted else {}
    needing = {f"{i}": name or merged for i, name in enumerate(names) if name != merged}
    assigned = {i: Assigned(held[name].handle, 0, name == merged) for i, name in needing.items() if name is not None}
    in_weights = 0 if merged is None else held[merged].handle
    forward.receive(StepPlan(forward.client.terms.server, assigned, tuple(held.values()), merged=in_weights))
    count = rows // max(1, len(names))
    forward.begin([f"{i}" for i in range(len(names))], [count] * len(names), [0] * len(names))


def answers(
    layer: Layer, names: Names, seed: int, play: Callable[[], None], merged: str | None = None
) -> list[torch.Tensor]:
    """Run one pass and return its results; see `begin`. Raises RuntimeError if it failed."""
    layer.feed(seed)
    begin(layer.forward, names, len(layer.x), merged)
    play()
    failures = layer.forward.end()
    if failures:
        raise RuntimeError(f"{names}: {failures}")
    return layer.results()


@contextmanager
def by_host(server: str, transport: str) -> Iterator[Layer]:
    """The oracle; without weights, for a GPU's GEMM and a CPU's round differently."""
    forward = PlannedPass(Client(RemoteServer(server, transport), SECONDS), lambda: True)
    try:
        yield Layer(forward.client.terms.spec, forward, ROWS, "cpu", scale=0.0)
    finally:
        forward.close()


@contextmanager
def by_launches(server: str, transport: str, device: str) -> Iterator[Layer]:
    """Make a layer with the passes under test, by launches."""
    client = Client(RemoteServer(server, transport, device=device), SECONDS)
    forward = LaunchedPass(client, lambda: True, dtype=torch.bfloat16, max_rows=ROWS, max_adapters=4)
    try:
        yield Layer(client.terms.spec, forward, ROWS, device, scale=0.0)
    finally:
        forward.close()


def judged(layer: Layer, oracle: Layer, plays: dict[str, Callable[[], None]]) -> dict[str, bool]:
    """Compare passes with the host's, for each way to play one: name -> whether it was right."""
    assert isinstance(layer.forward, LaunchedPass)
    found = {}
    for how, play in plays.items():
        for seed, names in enumerate(BATCHES):
            pairs = zip(answers(layer, names, seed, play), answers(oracle, names, seed, oracle.run), strict=True)
            found[f"{how}: {names}"] = all(torch.equal(ours, theirs) for ours, theirs in pairs)
        before = layer.forward.sent()
        found[f"{how}: base rows"] = not any(one.any() for one in answers(layer, (None,), SEED, play))
        found[f"{how}: base rows send nothing"] = layer.forward.sent() == before
    return found


def captured(layer: Layer) -> torch.cuda.CUDAGraph:
    """Capture a pass in a graph as vLLM does: rehearse without adapters, rehearse with them, capture."""
    for with_adapters in (False, True):
        with layer.forward.rehearse(with_adapters):
            layer.run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with layer.forward.rehearse(True), torch.cuda.graph(graph, capture_error_mode=CAPTURE):
        layer.run()
    return graph


def work(record: Record, arguments: argparse.Namespace) -> bool:
    """Whether every answer is the one that a host's client gets; times are only written down."""
    checks = Checks(record)
    with (
        tempfile.TemporaryDirectory(prefix="lora-passes-") as scratch,
        open_lab(record, Path(scratch), "cuda", "gpu") as lab,
    ):
        address, device = lab.server.address, torch.device("cuda", 0)
        with by_host(address, "shm") as oracle, by_launches(address, "gpu", "cuda") as layer:
            graph = captured(layer)
            for name, right in judged(layer, oracle, {"eager": layer.run, "replayed": graph.replay}).items():
                checks.judge(name, right)
            note(record, "a pass of base rows in a graph", lambda: timed_us(device, graph.replay))
            begin(layer.forward, BATCHES[1], ROWS)
            note(record, "a pass with adapters in a graph, three sites", lambda: timed_us(device, graph.replay))
            checks.judge("after all of them", layer.forward.end() == {})
        print(lab.server.tail())
    return checks.good


if __name__ == "__main__":
    stage.main(work, stage.parser(__doc__).parse_args(), modules=("cupy",))
