"""Servers whose kernels serve by themselves, in real processes: every transport's answers have TCP's bits, also anew
after a shard's death. The kernels' own source, on GPUs that are this CPU; what only a GPU can show is in bench/gpu_run.
"""

import dataclasses
import functools
import time

import pytest
import structlog
import torch
from torch import nn

from bench.gpu_run.passes import LAYER, Layer, answers, begin
from client_connector.client import Client
from client_connector.packing import Window
from client_connector.remote import RemoteServer
from client_connector.serving import linear
from client_connector.serving.experts import RemoteExperts
from client_connector.serving.launched import LaunchedPass
from client_connector.serving.linear import RemoteLinear
from client_connector.serving.plan import Assigned, StepPlan
from client_connector.serving.planned import PlannedPass
from client_connector.transformers import attach
from lora_server.config import MOST_LED, load
from lora_server.demo import tiny
from lora_server.demo.engine import pad
from lora_server.demo.launch import RunningServer, running_server
from lora_server.errors import ConfigError, ShardUnavailableError
from lora_server.placement import Layout, Placement
from lora_server.shard.numbers import MAX_FOLLOWERS
from lora_server.spec import Site
from tests.support.gpu import emulated, emulated_gpu
from tests.support.gpu.gpu_engine import ROWS, STRANGER, EngineProcess, killed_meanwhile
from tests.support.gpu.gpu_graph import Graph
from tests.support.gpu.gpu_steps import SITE, Steps
from tests.support.serving import HANG_SECONDS, cli, flags, shard_processes, status, until
from tests.support.workload import workload

pytestmark = [pytest.mark.usefixtures("forked"), pytest.mark.timeout(600)]  # a set-up builds kernels
MAX_STEP_ROWS = 16
LAYOUT = "ep2-pp1"


@dataclasses.dataclass(frozen=True)
class Setup:
    flags: tuple[str, ...] = ()
    wire: str = "exact"
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16,)  # of engines
    limit: float = 0.2  # of the error against PEFT in float32, in parts of what the base model's is

    @property
    def led(self) -> bool:
        return "leader" in self.flags


SETUPS = {
    "exact": Setup(),
    "led": Setup(("--coordination", "leader")),
    "e4m3": Setup(("--wire", "e4m3"), "e4m3", (torch.bfloat16, torch.float16), 0.25),
}
of_exact_rows = pytest.mark.parametrize("served", ["exact"], indirect=True)
BATCHES = [("fused",), ("qv", None, "experts"), ("attention", "fused", "fused", None), ("qv",)]


@dataclasses.dataclass
class Served:
    setup: Setup
    server: RunningServer

    @property
    def address(self) -> str:
        return self.server.address

    def join(self, transport: str = "gpu"):
        return RemoteServer(self.address, transport).join()

    def client(self, transport: str) -> Client:
        return Client(RemoteServer(self.address, transport), 20.0)

    def launched(self, **options) -> LaunchedPass:
        given = {"dtype": torch.bfloat16, "max_rows": 2 * ROWS, "max_adapters": 3, **options}
        return LaunchedPass(self.client("gpu"), lambda: True, **given)

    def steps(self, session, adapter: str, shard: int | None = None) -> Steps:
        """At a site of that shard, or of the one that has the site."""
        (held,) = session.acquire([adapter], time.monotonic() + HANG_SECONDS)
        owner = Placement(session.terms.spec, Layout.parse(LAYOUT)).owners(SITE)[0]
        return Steps(session, held.handle, owner if shard is None else shard)

    def logits(self, transport: str, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        batch, names = workload("mixtral").batch[:6], workload("mixtral").names[:6]
        model, (ids, mask) = tiny.make_model("mixtral", dtype=dtype), pad(batch, 0)
        with attach(model, server=self.address, transport=transport) as lora, lora.adapters(names):
            assert lora.client.described()["wire"] == self.setup.wire
            assert lora.client.lanes.takes(torch.device("cpu")) == (transport == "gpu"), "routed by a kernel"
            return model(ids, attention_mask=mask).logits[:, -1].float()


@pytest.fixture(scope="module", params=SETUPS)
def served(request, tmp_path_factory):
    """Two shards whose kernels serve, and this process's GPU. All kernels are compiled first, once."""
    if emulated.MISSING:
        pytest.skip(emulated.MISSING)
    setup, models = SETUPS[request.param], workload("mixtral")
    emulated_gpu.compile_all(in_codes=setup.wire == "e4m3")
    emulated_gpu.use()
    more = ["--dtype", "bfloat16", "--layout", LAYOUT, "--max-step-rows", str(MAX_STEP_ROWS), *setup.flags]
    more += ["--data-dir", str(tmp_path_factory.mktemp("data")), "--adapter-root", str(tmp_path_factory.getbasetemp())]
    log = tmp_path_factory.mktemp("log") / "log"
    with running_server(log, flags(models, *more), module="tests.support.gpu.gpu_serve") as server:
        yield Served(setup, server)
    del emulated_gpu.opened.openers["cpu"]


@functools.cache
def exact_logits() -> torch.Tensor:
    """PEFT's, in float32."""
    models = workload("mixtral")
    oracles = [(tiny.peft_model(models.model, models.paths[one.adapter]), one.prompt) for one in models.batch[:6]]
    return torch.stack([oracle(torch.tensor([prompt])).logits[0, -1] for oracle, prompt in oracles])


def test_every_transport_gives_the_bits_of_one_kernel(served):
    """An engine on a GPU, and clients that a host polls; also where a shard has nothing of a site: a led stage is sent
    an empty step there, so that both count alike."""
    for dtype in served.setup.dtypes:
        found = [served.logits(transport, dtype) for transport in ("gpu", "shm", "tcp")]
        assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
        ids, mask = pad(workload("mixtral").batch[:6], 0)
        base = tiny.make_model("mixtral", dtype=dtype)(ids, attention_mask=mask).logits[:, -1].float()
        ours, without = ((one - exact_logits()).abs().mean() for one in (found[0], base))
        assert ours < served.setup.limit * without, f"{ours} from PEFT in float32, {without} without adapters"


def captured(layer: Layer, with_adapters: bool = True) -> Graph:
    """After a rehearsal for base rows only, as engines have one first."""
    with layer.forward.rehearse(False):
        layer.run()
    graph = Graph(layer.forward)
    with graph.capture(with_adapters):
        layer.run()
    return graph


class Compared:
    """A launched pass of a layer, and the same by way of a host, over TCP."""

    def __init__(self, served: Served) -> None:
        self._served, self.forward = served, served.launched()
        self.layer = Layer(self.forward.client.terms.spec, self.forward, ROWS, "cpu")
        self.join_host()

    def join_host(self) -> None:
        self._other = PlannedPass(self._served.client("tcp"), lambda: True)
        self._theirs = Layer(self.forward.client.terms.spec, self._other, ROWS, "cpu")

    def check(self, play, seed: int, *names: str | None) -> None:
        ours, theirs = answers(self.layer, names, seed, play), answers(self._theirs, names, seed, self._theirs.run)
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)), names

    def fail(self, play) -> dict[str, str]:
        """The codes of a pass of two requests, of which one names an adapter that nobody has."""
        (good,) = self.forward.client.acquire(["fused"], loaded=True)
        bad = good.__class__("nobody", STRANGER, good.sites, "v", None)
        rows = {"g": Assigned(good.handle, 0), "b": Assigned(bad.handle, 0)}
        self.layer.feed(1)
        self.forward.receive(StepPlan(self.forward.client.terms.server, rows, (good, bad)))
        self.forward.begin(["g", "b"], [ROWS // 2, ROWS // 2], [0, 0])
        play()
        return {name: failure.code for name, failure in self.forward.end().items()}

    def close(self) -> None:
        self.forward.close(), self._other.close()


def test_recorded_launches_serve_every_pass(served):
    """Other routes, rows and adapters, more than there is room for at once, rows of nobody's, and none at all. A bad
    adapter fails its requests and no other. The shards of a led stage are sent as many steps, whoever has something of
    them, also behind a refusal, which ends the pass on all links."""
    both = Compared(served)
    assert captured(both.layer, with_adapters=False).launches == [], "base rows need none of ours"
    graph, sent = captured(both.layer), both.forward.sent
    assert sent() == [0, 0], "nothing is sent while it is captured"
    for seed, names in enumerate(BATCHES):
        both.check(graph.replay, seed, *names)
    before = sent()
    assert all(before), "both shards have experts"
    for seed, names in enumerate([(None, None), (), (None,)]):
        both.check(graph.replay, seed, *names)
    assert sent() == before, "a step of base rows sends nothing"
    both.check(graph.replay, 9, "experts", "gate-up")
    both.check(both.layer.run, 10, "experts", "fused")
    assert both.fail(graph.replay) == {"g": "retry", "b": "unknown_adapter"}
    assert not served.setup.led or len(set(sent())) == 1, "the stage counts alike"
    both.check(graph.replay, 2, "fused", None)
    both.close()


def test_recorded_launches_subtract_what_is_merged_into_the_weights(served):
    """Rows of the merged adapter send nothing. Others get what a host's exchange adds, which sums both deltas before it
    rounds them: the same but for one rounding of each."""
    forward, host = served.launched(merged=True), PlannedPass(served.client("tcp"), lambda: True)
    ours, theirs = (Layer(one.client.terms.spec, one, ROWS, "cpu", scale=0.0) for one in (forward, host))
    graph, limit = captured(ours), 0.02 if served.setup.wire == "exact" else 0.05  # by an answer's own error
    for seed, names in enumerate([("qv", "fused", None), (None,), ("attention", "experts"), (None, "fused")]):
        for got, expected in zip(
            answers(ours, names, seed, graph.replay, "fused"),
            answers(theirs, names, seed, theirs.run, "fused"),
            strict=True,
        ):
            assert expected.norm() > 0.1 and (got - expected).norm() < limit * expected.norm(), names
    before = forward.sent()
    assert not any(one.any() for one in answers(ours, ("fused",), 5, graph.replay, "fused"))
    assert forward.sent() == before and all(before)
    forward.close(), host.close()


@of_exact_rows
def test_clients_of_both_kinds_take_turns_on_one_kernel(served):
    sessions = [served.join(transport) for transport in ("gpu", "shm", "gpu", "tcp")]
    steps = [served.steps(session, "fused") for session in sessions]
    first = steps[0].step()
    for _ in range(4):
        sent = [one.push() for one in steps]
        for one, header in zip(steps, sent, strict=True):
            one.link.wait(header.seq, time.monotonic() + HANG_SECONDS)
            assert torch.equal(one.link.rows.response(header), first)
    for session in sessions:
        session.leave()
    until(lambda: status(served.address).shards[0].stats.clients == 0, "all have gone")


@of_exact_rows
def test_a_client_killed_in_the_middle_of_a_put_harms_nobody(served):
    """Its rows are there, and its signal is not: the put's blocks wait for each other."""
    survivor = served.join()
    steps = served.steps(survivor, "qv")
    before = steps.step()
    other = EngineProcess(served.address, "gpu", "fused")
    try:
        assert [other.ask("join")["event"], other.ask("go")["event"]] == ["joined", "went"]
        assert other.ask("halt", rounds=1)["event"] == "halted"
        assert torch.equal(steps.step(), before)
    finally:
        other.end()
    until(lambda: status(served.address).shards[0].stats.clients == 1, "it is missed")
    assert torch.equal(steps.step(), before)
    survivor.leave()


@of_exact_rows
def test_adapters_come_and_go_while_steps_run(served, tmp_path):
    """Evicted ones come back, one that is dropped is refused, and nobody's bits change."""
    session = served.join()
    steps = {name: served.steps(session, name) for name in ("fused", "qv")}
    tiny.make_adapter(workload("mixtral").model, tmp_path / "late", seed=99, lora_rank=20, targets="all")
    seq, before = 0, {}
    for turn in range(2):
        assert cli("adapters", "add", "--server", served.address, "late", str(tmp_path / "late")).returncode == 0
        late = served.steps(session, "late")
        for name, one in (*steps.items(), ("late", late)):
            one.seq = seq
            got, seq = one.step(), one.seq
            assert torch.equal(before.setdefault(name, got), got), f"{name}, turn {turn}"
        session.release([late.handle])
        assert cli("adapters", "remove", "--server", served.address, "late").returncode == 0
        late.seq = seq
        assert late.step() == "unknown_adapter"
        seq = late.seq
    session.leave()
    assert any(shard.stats.evictions for shard in status(served.address).shards), "six pages, seven adapters"


@of_exact_rows
def test_ops_in_a_full_graph(served):
    """Compiled, without a break; what they change is what they say that they change."""
    forward = served.launched()
    spec, site = forward.client.terms.spec, Site(LAYER, "qkv")
    width, out = spec.in_width(site), spec.out_width(site)
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
        found = []
        for play in (compiled, compute):
            begin(forward, names, ROWS)
            found.append(play(x))
            assert forward.end() == {}
        ours, eager = found
        assert all(torch.equal(a, b) for a, b in zip(ours, eager, strict=True)) and not torch.equal(ours[1], plain[1])
    assert torch.equal(compiled(x)[1], plain[1])
    index = len(linear._LINEARS) - 1
    torch.library.opcheck(torch.ops.lora_server.add_.default, (plain[1].clone(), x, x.new_empty(0), index))
    forward.close()


def part(
    forward: PlannedPass, rank: int, expert_map: torch.Tensor | None, interleaved: bool, rows: torch.Tensor | None
) -> list[torch.Tensor]:
    """One of two tensor-parallel ranks: its columns of q, k and v, its rows of o, its part of every expert. `rows`: the
    pass's row of each row of the sites, where they are others."""
    spec = forward.client.terms.spec
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
        remote.push(x, rows)
        remote.add(results[-1])
    begin = rank * half
    gate_up = Window(0, ((begin, begin + half), (spec.ffn + begin, spec.ffn + begin + half)))
    experts = RemoteExperts(forward, LAYER, gate_up, Window(begin, ((0, hidden),)), half)
    ids = torch.stack([torch.randperm(8, generator=generator)[:2] for _ in range(ROWS)])
    x, act = (torch.randn(rows, n, generator=generator).bfloat16() for rows, n in ((ROWS, hidden), (2 * ROWS, half)))
    up, down = torch.zeros(2 * ROWS, 2 * half).bfloat16(), torch.zeros(ROWS, hidden).bfloat16()
    experts.finish_gate_up(experts.start_gate_up(x, ids, expert_map, rows), up, interleaved)
    weights = torch.rand(ROWS, 2, generator=generator)
    experts.finish_down(experts.start_down(act, ids, weights, expert_map, rows), down)
    return [*results, up, down]


@of_exact_rows
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("expert_map", "interleaved"), [(None, True), ([0, 1, -1, 2, -1, -1, 3, -1], False)])
@pytest.mark.parametrize("rows", [None, [ROWS - 1, -1, *[0] * (ROWS - 2)]])
def test_a_rank_of_a_parallel_engine(served, rank, expert_map, interleaved, rows):
    rows = None if rows is None else torch.tensor(rows)
    here = None if expert_map is None else torch.tensor(expert_map)
    found = []
    for forward in (served.launched(), PlannedPass(served.client("tcp"), lambda: True)):
        begin(forward, ("fused", None, "attention"), ROWS)
        found.append(part(forward, rank, here, interleaved, rows))
        assert forward.end() == {}
        forward.close()
    for ours, theirs in zip(*found, strict=True):
        assert ours.any() and torch.equal(ours, theirs)
        assert rows is None or not ours.view(ROWS, -1)[1].any(), "row 1 is none of the pass"


@of_exact_rows
def test_what_launches_cannot_do_is_refused(served):
    """At the start, or of a server that comes back with less room."""
    with pytest.raises(ConfigError, match="expected bfloat16 or float16"):
        served.launched(dtype=torch.float32)
    with pytest.raises(ConfigError, match="fewer requests at once"):
        served.launched(max_adapters=1 << 17)
    forward = served.launched()
    links = forward.sites.links
    links.pairs, links._session = 2 * MAX_STEP_ROWS, None
    begin(forward, ("fused",), ROWS)
    (failure,) = forward.end().values()
    assert failure.code == ConfigError.code and "restart the engine" in failure.message
    forward.close()


@of_exact_rows
def test_messages_and_slots_are_as_large_as_the_engines_steps(served):
    """Or as the server has room for; an engine whose decoding steps do not fit one message is told the cure."""
    for max_rows, max_adapters, pairs, depth in ((3, 3, 6, 1), (8, 8, MAX_STEP_ROWS, 1), (9, 9, MAX_STEP_ROWS, 2)):
        with structlog.testing.capture_logs() as said:
            forward = served.launched(max_rows=max_rows, max_adapters=max_adapters)
        routes = forward.sites._captured._routes
        assert (forward.sites.links.pairs, {len(its) for its in routes}) == (pairs, {depth})
        assert ("larger --max-step-rows" in str(said)) == (2 * max_adapters > MAX_STEP_ROWS)
        forward.close()


@pytest.mark.parametrize("served", ["exact", "led"], indirect=True)
def test_a_shard_that_dies_is_missed_and_its_successor_serves(served):
    """It leads, or is led, as before. No step is a follower's without its leader's number: it is refused in time."""
    before = served.logits("gpu")
    for victim in (0, 1) if served.setup.led else (0,):
        session = served.join()
        both = [served.steps(session, "fused", shard) for shard in (0, 1)]
        if served.setup.led:
            began = time.monotonic()
            assert both[1].step(0.5) == "step_timeout" and time.monotonic() - began >= 0.5
        dead = shard_processes(served.address)[victim]
        dead.kill()
        with pytest.raises(ShardUnavailableError, match="the shard closed the connection"):
            for _ in range(1000):
                both[victim].step(0.1)
        session.leave()
        # a successor that comes between two looks at /readyz would hide that it was missed
        gone = {0, dead.pid}
        until(
            lambda gone=gone: gone.isdisjoint(one.pid for one in status(served.address).shards),
            "its successor is there",
        )
        served.server.wait_ready()  # also while the leader has not reported yet that its follower is gone
        led = int(served.setup.led)
        until(lambda led=led: status(served.address).shards[0].stats.followers == led, "it is led as before")
        assert torch.equal(served.logits("gpu"), before)


@of_exact_rows
def test_a_shard_killed_while_a_pass_waits_voids_it_and_the_graph_lives_on(served):
    """Never the base model's tokens: the requests are named, with the reason. After a rejoin the launches serve on."""
    both = Compared(served)
    graph = captured(both.layer)
    both.check(graph.replay, 1, "fused", "qv")
    launches = list(graph.launches)
    begin(both.forward, ("fused", None), ROWS)
    killer = killed_meanwhile(both.forward, shard_processes(served.address)[0].pid)
    graph.replay()
    killer.join()
    assert {name: failure.code for name, failure in both.forward.end().items()} == {"0": "shard_unavailable"}
    served.server.wait_ready()
    begin(both.forward, ("fused",), ROWS)  # handles of a session that is gone: joins anew, and says so
    both.forward.end()
    assert both.forward.client.broken is None
    both._other.close()
    both.join_host()
    both.check(graph.replay, 3, "experts", "fused", None)
    assert graph.launches == launches
    both.close()


def test_what_no_leader_can_tell_is_refused():
    assert MOST_LED == MAX_FOLLOWERS + 1
    led = {"base_model": "x", "device": "cuda", "gpu_transport": "gpu", "coordination": "leader"}
    load(led | {"layout": "ep2-pp4", "nodes": 2})
    for wrong in ({"layout": "ep4-pp1", "nodes": 2}, {"layout": f"ep{MOST_LED + 1}-pp1"}):
        with pytest.raises(ConfigError, match="coordination: got leader"):
            load(led | wrong)
    with pytest.raises(ConfigError, match="expected --gpu-transport gpu and every stage on one node"):
        load(led | {"gpu_transport": "nvshmem", "nvshmem_clients": 1, "layout": "ep2-pp1"})
