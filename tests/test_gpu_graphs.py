"""A serving engine whose steps are launches: recorded once, with nobody's rows, they serve every pass after that.

Real processes and a server of two shards; GPUs are this CPU, kernels their own source. The oracle is an engine that
reaches the same shards over TCP, whose host routes, sends, waits and adds at every site.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import threading

import numpy as np
import pytest
import torch
from torch import nn

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
from lora_server.transport.gpu.layout import CLIENT
from tests import emulated, emulated_gpu
from tests.gpu_graph import Graph
from tests.serving import shard_processes, until
from tests.workload import Workload, workload

pytestmark = pytest.mark.skipif(bool(emulated.MISSING), reason=emulated.MISSING)
ROWS, TOP_K, LAYER = 20, 2, 1  # more entries than a message holds: chunks
MAX_STEP_ROWS = 16
NAMES = ("fused", "experts", "attention", "qv", None)


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
    with running_server(tmp_path_factory.mktemp("log") / "log", flags, module="tests.gpu_serve") as server:
        yield Served(server, load)
    del emulated_gpu.opened.openers["cpu"]


class Model:
    """One layer's sites, whose inputs and results lie where they always do."""

    def __init__(self, spec, forward: PlannedPass) -> None:
        hidden, ffn, generator = spec.hidden, spec.ffn, torch.Generator().manual_seed(5)
        site = Site(LAYER, "qkv")
        self.forward = forward
        self.linear = RemoteLinear(forward, site, Window(0, ((0, spec.out_width(site)),)))
        self.experts = RemoteExperts(
            forward, LAYER, Window(0, ((0, ffn), (ffn, 2 * ffn))), Window(0, ((0, hidden),)), ffn
        )
        self.weight = torch.randn(spec.out_width(site), hidden, generator=generator).bfloat16()
        self.x, self.act = (torch.zeros(rows, n).bfloat16() for rows, n in ((ROWS, hidden), (ROWS * TOP_K, ffn)))
        self.ids, self.weights = torch.zeros(ROWS, TOP_K, dtype=torch.int32), torch.zeros(ROWS, TOP_K)
        self.qkv = torch.zeros(ROWS, spec.out_width(site)).bfloat16()
        self.up, self.down = (torch.zeros(rows, n).bfloat16() for rows, n in ((ROWS * TOP_K, 2 * ffn), (ROWS, hidden)))

    def feed(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for into in (self.x, self.act, self.weights):
            into.copy_(torch.randn(into.shape, generator=generator))
        chosen = torch.stack([torch.randperm(8, generator=generator)[:TOP_K] for _ in range(ROWS)])
        self.ids.copy_(chosen.int())

    def run(self) -> None:
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
        return [one.clone() for one in (self.qkv, self.up, self.down)]


def begin(forward: PlannedPass, names) -> None:
    """A pass of one request per name, each with some rows; `None` is the base model's. Adapters are held anew."""
    wanted = sorted({name for name in names if name is not None})
    held = {one.name: one for one in forward.client.acquire(wanted)} if wanted else {}
    rows = {f"{i}": Assigned(held[name].handle, 0) for i, name in enumerate(names) if name is not None}
    forward.receive(StepPlan(forward.client.terms.server, rows, tuple(held.values())))
    counts = [ROWS // len(names) for _ in names] if names else []
    forward.begin([f"{i}" for i in range(len(names))], counts, [0] * len(names))


def expected(served, names, seed: int) -> list[torch.Tensor]:
    """By way of the host."""
    forward = PlannedPass(served.join("tcp"), lambda: True)
    model = Model(served.load.spec, forward)
    model.feed(seed)
    begin(forward, names)
    model.run()
    assert forward.end() == {}
    forward.close()
    return model.results()


def pushed(forward: LaunchedPass) -> list[int]:
    states = [bytes(captured.link.state.tolist()) for captured in forward._captured]
    return [int(np.frombuffer(state, CLIENT)["pushed"][0]) for state in states]


def check(served, model: Model, play, names, seed: int) -> None:
    model.feed(seed)
    begin(model.forward, names)
    play()
    assert model.forward.end() == {}
    for ours, theirs in zip(model.results(), expected(served, names, seed), strict=True):
        assert torch.equal(ours, theirs), names


def captured(forward: LaunchedPass, model: Model, with_adapters: bool = True) -> Graph:
    """After a rehearsal for base rows only, as engines have one first."""
    with forward.rehearse(False):
        model.run()
    graph = Graph(forward)
    with graph.capture(with_adapters):
        model.run()
    return graph


def test_recorded_launches_serve_every_pass(served):
    """Other routes, rows and adapters, more than there is room for at once, rows of nobody's, and none at all."""
    forward = served.launched()
    model = Model(served.load.spec, forward)
    graph = captured(forward, model)
    assert pushed(forward) == [0, 0], "nothing is sent while it is captured"
    for seed, names in enumerate([("fused",), ("qv", None, "experts"), ("attention", "fused", "fused", None), ("qv",)]):
        check(served, model, graph.replay, names, seed)
    before = pushed(forward)
    for seed, names in enumerate([(None, None), (), (None,)]):
        check(served, model, graph.replay, names, seed)
    assert pushed(forward) == before, "a step of base rows sends nothing"
    check(served, model, graph.replay, ("experts", "gate-up"), 9)
    check(served, model, model.run, ("experts", "fused"), 10)
    assert pushed(forward)[1] > before[1], "both shards have experts"
    forward.close()


def test_a_graph_for_base_rows_has_no_launch_of_ours(served):
    forward = served.launched()
    graph = captured(forward, Model(served.load.spec, forward), with_adapters=False)
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
        begin(forward, names)
        ours = compiled(x)
        assert forward.end() == {}
        begin(forward, names)
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


def test_a_bad_adapter_fails_its_requests_and_no_other(served):
    forward = served.launched()
    model = Model(served.load.spec, forward)
    graph = captured(forward, model)
    (good,) = forward.client.acquire(["fused"])
    bad = good.__class__("nobody", 700 | 1 << 16, good.sites, "v", None)
    rows = {"g": Assigned(good.handle, 0), "b": Assigned(bad.handle, 0)}
    model.feed(1)
    forward.receive(StepPlan(forward.client.terms.server, rows, (good, bad)))
    forward.begin(["g", "b"], [2, 2], [0, 0])
    graph.replay()
    failures = forward.end()
    assert {name: failure.code for name, failure in failures.items()} == {"g": "retry", "b": "unknown_adapter"}
    check(served, model, graph.replay, ("fused", None), 2)
    forward.close()


def test_a_shard_killed_while_a_pass_waits_voids_it_and_the_graph_lives_on(served):
    """Never the base model's tokens: the requests are named, with the reason. After a rejoin the launches serve on."""
    forward = served.launched()
    model = Model(served.load.spec, forward)
    graph = captured(forward, model)
    check(served, model, graph.replay, ("fused", "qv"), 1)
    launches, victim = list(graph.launches), shard_processes(served.server.address)[0]
    begin(forward, ("fused", None))
    before = pushed(forward)
    victim.send_signal(signal.SIGSTOP)  # it answers nothing any more

    def kill() -> None:
        until(lambda: pushed(forward) != before, "the pass has sent something, and waits")
        os.kill(victim.pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    graph.replay()
    killer.join()
    failures = forward.end()
    assert {name: failure.code for name, failure in failures.items()} == {"0": "shard_unavailable"}, failures

    served.server.wait_ready()
    begin(forward, ("fused",))  # handles of a session that is gone: joins anew, and says so
    forward.end()
    assert forward.client.broken is None
    check(served, model, graph.replay, ("experts", "fused", None), 3)
    assert graph.launches == launches
    forward.close()


def test_a_server_that_comes_back_with_less_room_is_refused(served):
    forward = served.launched()
    forward._terms = dataclasses.replace(forward._terms, max_step_rows=2 * MAX_STEP_ROWS)
    forward._session = None
    begin(forward, ("fused",))
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
