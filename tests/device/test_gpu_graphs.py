"""A serving engine whose steps are launches: recorded once, with nobody's rows, they serve every pass after that.

Real processes and a server of two shards; GPUs are this CPU, kernels their own source. The oracle is an engine that
reaches the same shards over TCP, whose host routes, sends, waits and adds at every site.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import threading

import pytest
import torch
from torch import nn

from bench.gpu_run.passes import LAYER, Layer, answers, begin
from client_connector.client import Client
from client_connector.packing import Window
from client_connector.remote import RemoteServer
from client_connector.serving.experts import RemoteExperts
from client_connector.serving.launched import LaunchedPass
from client_connector.serving.linear import RemoteLinear
from client_connector.serving.plan import Assigned, StepPlan
from client_connector.serving.planned import PlannedPass
from lora_server.demo.launch import RunningServer, running_server
from lora_server.errors import ConfigError
from lora_server.spec import Site
from tests.support.gpu import emulated, emulated_gpu
from tests.support.gpu.gpu_graph import Graph
from tests.support.serving import shard_processes, until
from tests.support.workload import Workload, workload

pytestmark = pytest.mark.skipif(bool(emulated.MISSING), reason=emulated.MISSING)
ROWS = 20  # more entries than a message holds: chunks
MAX_STEP_ROWS = 16


@dataclasses.dataclass
class Served:
    server: RunningServer
    load: Workload

    def join(self, transport: str) -> Client:
        return Client(RemoteServer(self.server.address, transport), 20.0)

    def launched(self, **options) -> LaunchedPass:
        given = {"dtype": torch.bfloat16, "max_rows": 2 * ROWS, "max_adapters": 3, **options}
        return LaunchedPass(self.join("gpu"), lambda: True, **given)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    emulated_gpu.compile_all()
    load = workload("mixtral")
    emulated_gpu.use()
    flags = ["--base-model", str(load.base), "--adapters", str(load.adapters), "--dtype", "bfloat16"]
    flags += ["--layout", "ep2-pp1", "--max-step-rows", str(MAX_STEP_ROWS)]
    flags += ["--data-dir", str(tmp_path_factory.mktemp("data"))]
    with running_server(tmp_path_factory.mktemp("log") / "log", flags, module="tests.support.gpu.gpu_serve") as server:
        yield Served(server, load)
    del emulated_gpu.opened.openers["cpu"]


def expected(served, names, seed: int) -> list[torch.Tensor]:
    """By way of the host."""
    forward = PlannedPass(served.join("tcp"), lambda: True)
    layer = Layer(served.load.spec, forward, ROWS, "cpu")
    found = answers(layer, names, seed, layer.run)
    forward.close()
    return found


def check(served, layer: Layer, play, names, seed: int) -> None:
    for ours, theirs in zip(answers(layer, names, seed, play), expected(served, names, seed), strict=True):
        assert torch.equal(ours, theirs), names


def captured(layer: Layer, with_adapters: bool = True) -> Graph:
    """After a rehearsal for base rows only, as engines have one first."""
    with layer.forward.rehearse(False):
        layer.run()
    graph = Graph(layer.forward)
    with graph.capture(with_adapters):
        layer.run()
    return graph


def test_recorded_launches_serve_every_pass(served):
    """Other routes, rows and adapters, more than there is room for at once, rows of nobody's, and none at all."""
    forward = served.launched()
    layer = Layer(served.load.spec, forward, ROWS, "cpu")
    graph = captured(layer)
    assert forward.sent() == [0, 0], "nothing is sent while it is captured"
    for seed, names in enumerate([("fused",), ("qv", None, "experts"), ("attention", "fused", "fused", None), ("qv",)]):
        check(served, layer, graph.replay, names, seed)
    before = forward.sent()
    for seed, names in enumerate([(None, None), (), (None,)]):
        check(served, layer, graph.replay, names, seed)
    assert forward.sent() == before, "a step of base rows sends nothing"
    check(served, layer, graph.replay, ("experts", "gate-up"), 9)
    check(served, layer, layer.run, ("experts", "fused"), 10)
    assert forward.sent()[1] > before[1], "both shards have experts"
    forward.close()


def test_a_graph_for_base_rows_has_no_launch_of_ours(served):
    forward = served.launched()
    graph = captured(Layer(served.load.spec, forward, ROWS, "cpu"), with_adapters=False)
    assert graph.launches == []
    forward.close()


def test_ops_in_a_full_graph(served):
    """Compiled, without a break; what they change is what they say that they change."""
    forward = served.launched()
    site = Site(LAYER, "qkv")
    width, out = served.load.spec.in_width(site), served.load.spec.out_width(site)
    layer = nn.Linear(width, out, dtype=torch.bfloat16)
    remote = RemoteLinear(forward, site, Window(0, ((0, out),)))
    apply = remote.around(lambda layer, x, bias: nn.functional.linear(x, layer.weight, bias))

    def compute(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = apply(layer, x * 2, layer.bias)
        return y + 1, y

    compiled = torch.compile(compute, fullgraph=True, backend="aot_eager")
    x = torch.randn(ROWS, width, generator=torch.Generator().manual_seed(3)).bfloat16()
    with forward.rehearse(True):
        plain = compiled(x)
    for names in (("fused", None), ("qv", "fused")):
        begin(forward, names, ROWS)
        ours = compiled(x)
        assert forward.end() == {}
        begin(forward, names, ROWS)
        eager = compute(x)
        assert forward.end() == {}
        assert all(torch.equal(a, b) for a, b in zip(ours, eager, strict=True)) and not torch.equal(ours[1], plain[1])
    assert torch.equal(compiled(x)[1], plain[1])
    torch.library.opcheck(
        torch.ops.lora_server.add_.default, (plain[1].clone(), x, x.new_empty(0), len(_linears()) - 1)
    )
    forward.close()


def _linears() -> list[RemoteLinear]:
    from client_connector.serving import linear

    return linear._LINEARS


def part(
    forward: PlannedPass, spec, rank: int, expert_map: torch.Tensor | None, interleaved: bool
) -> list[torch.Tensor]:
    """One of two tensor-parallel ranks: its columns of q, k and v, its rows of o, its part of every expert."""
    generator, half, hidden = torch.Generator().manual_seed(rank), spec.ffn // 2, spec.hidden
    windows = []
    for section in spec.sections(Site(LAYER, "qkv")):
        width = (section.end - section.begin) // 2
        windows.append((section.begin + rank * width, section.begin + (rank + 1) * width))
    into = spec.in_width(Site(LAYER, "o")) // 2
    dense = (("qkv", hidden, Window(0, tuple(windows))), ("o", into, Window(rank * into, ((0, hidden),))))
    results = []
    for projection, columns, window in dense:
        remote = RemoteLinear(forward, Site(LAYER, projection), window)
        x = torch.randn(ROWS, 2 * columns, generator=generator).bfloat16()[:, :columns]  # rows that lie apart
        results.append(torch.zeros(ROWS, sum(end - begin for begin, end in window.out)).bfloat16())
        remote.push(x)
        remote.add(results[-1])
    begin = rank * half
    gate_up = Window(0, ((begin, begin + half), (spec.ffn + begin, spec.ffn + begin + half)))
    experts = RemoteExperts(forward, LAYER, gate_up, Window(begin, ((0, hidden),)), half)
    ids = torch.stack([torch.randperm(8, generator=generator)[:2] for _ in range(ROWS)])
    x, act = (torch.randn(rows, n, generator=generator).bfloat16() for rows, n in ((ROWS, hidden), (2 * ROWS, half)))
    up, down = torch.zeros(2 * ROWS, 2 * half).bfloat16(), torch.zeros(ROWS, hidden).bfloat16()
    experts.finish_gate_up(experts.start_gate_up(x, ids, expert_map), up, interleaved)
    weights = torch.rand(ROWS, 2, generator=generator)
    experts.finish_down(experts.start_down(act, ids, weights, expert_map), down)
    return [*results, up, down]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("expert_map", "interleaved"), [(None, True), ([0, 1, -1, 2, -1, -1, 3, -1], False)])
def test_a_rank_of_a_parallel_engine(served, rank, expert_map, interleaved):
    here = None if expert_map is None else torch.tensor(expert_map)
    found = []
    for forward in (served.launched(), PlannedPass(served.join("tcp"), lambda: True)):
        begin(forward, ("fused", None, "attention"), ROWS)
        found.append(part(forward, served.load.spec, rank, here, interleaved))
        assert forward.end() == {}
        forward.close()
    for ours, theirs in zip(*found, strict=True):
        assert ours.any() and torch.equal(ours, theirs)


def test_a_bad_adapter_fails_its_requests_and_no_other(served):
    forward = served.launched()
    layer = Layer(served.load.spec, forward, ROWS, "cpu")
    graph = captured(layer)
    (good,) = forward.client.acquire(["fused"])
    bad = good.__class__("nobody", 700 | 1 << 16, good.sites, "v", None)
    rows = {"g": Assigned(good.handle, 0), "b": Assigned(bad.handle, 0)}
    layer.feed(1)
    forward.receive(StepPlan(forward.client.terms.server, rows, (good, bad)))
    forward.begin(["g", "b"], [2, 2], [0, 0])
    graph.replay()
    failures = forward.end()
    assert {name: failure.code for name, failure in failures.items()} == {"g": "retry", "b": "unknown_adapter"}
    check(served, layer, graph.replay, ("fused", None), 2)
    forward.close()


def test_a_shard_killed_while_a_pass_waits_voids_it_and_the_graph_lives_on(served):
    """Never the base model's tokens: the requests are named, with the reason. After a rejoin the launches serve on."""
    forward = served.launched()
    layer = Layer(served.load.spec, forward, ROWS, "cpu")
    graph = captured(layer)
    check(served, layer, graph.replay, ("fused", "qv"), 1)
    launches, victim = list(graph.launches), shard_processes(served.server.address)[0]
    begin(forward, ("fused", None), ROWS)
    before = forward.sent()
    victim.send_signal(signal.SIGSTOP)  # it answers nothing any more

    def kill() -> None:
        until(lambda: forward.sent() != before, "the pass has sent something, and waits")
        os.kill(victim.pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    graph.replay()
    killer.join()
    failures = forward.end()
    assert {name: failure.code for name, failure in failures.items()} == {"0": "shard_unavailable"}, failures

    served.server.wait_ready()
    begin(forward, ("fused",), ROWS)  # handles of a session that is gone: joins anew, and says so
    forward.end()
    assert forward.client.broken is None
    check(served, layer, graph.replay, ("experts", "fused", None), 3)
    assert graph.launches == launches
    forward.close()


def test_a_server_that_comes_back_with_less_room_is_refused(served):
    forward = served.launched()
    forward._terms = dataclasses.replace(forward._terms, max_step_rows=2 * MAX_STEP_ROWS)
    forward._session = None
    begin(forward, ("fused",), ROWS)
    (failure,) = forward.end().values()
    assert failure.code == ConfigError.code and "restart the engine" in failure.message
    forward.close()


@pytest.mark.parametrize(
    ("options", "error"),
    [({"dtype": torch.float32}, "expected bfloat16 or float16"), ({"max_adapters": 1 << 17}, "fewer requests at once")],
)
def test_what_launches_cannot_do_is_refused_at_the_start(served, options, error):
    with pytest.raises(ConfigError, match=error):
        served.launched(**options)
