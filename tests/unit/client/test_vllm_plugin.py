"""The parts of the vLLM plugin that need no vLLM: settings, windows' arithmetic, opaque ops, experts, versions."""

import contextlib
import dataclasses
import inspect
import threading
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from structlog.testing import capture_logs
from torch import nn

from client_connector.client import Client
from client_connector.packing import Window
from client_connector.reconnect import Reconnector
from client_connector.serving.experts import RemoteExperts
from client_connector.serving.linear import RemoteLinear
from client_connector.serving.plan import Assigned, Failure, StepPlan, parse_flag
from client_connector.serving.planned import PlannedPass
from client_connector.serving.settings import KEY
from client_connector.vllm.amx import ask_for_amx
from client_connector.vllm.contract import SUPPORTED
from client_connector.vllm.graphs import split_graphs
from client_connector.vllm.punica import RemotePunica
from client_connector.vllm.settings import configured, of_engine
from lora_server import errors
from lora_server.adapters import open_adapter
from lora_server.demo.inproc import InprocServer
from lora_server.demo.serve_vllm import engine_environment
from lora_server.errors import ConfigError
from lora_server.spec import Site
from tests.support.gpu.emulated_link import EmulatedServer
from tests.support.serving import until
from tests.support.workload import workload

TOKENS = 7


@pytest.mark.parametrize(("config", "environment", "address"), [
    (None, {}, None),
    ({}, {"LORA_SERVER_ADDRESS": ""}, None),
    ({"other": 1}, {"LORA_SERVER_ADDRESS": "h:1"}, "h:1"),
    ({"lora_server": "h:2"}, {"LORA_SERVER_ADDRESS": "h:1"}, "h:2"),
    ({"lora_server": {"address": "h:3", "on_failure": "base_model"}}, {}, "h:3"),
])  # fmt: skip
def test_where_the_address_comes_from(config, environment, address):
    found = configured(config, environment)
    assert (found.address if found else None) == address


def test_settings_travel_in_the_engines_config():
    own = {"address": "h:3", "timeout_seconds": 2, "served_names": ["base", "mixtral"]}
    found = configured({"lora_server": own}, {"LORA_SERVER_ON_FAILURE": "base_model"})
    assert (found.timeout_seconds, found.on_failure) == (2.0, "base_model")
    assert of_engine(SimpleNamespace(additional_config={KEY: found.as_config()})) == found
    assert of_engine(object()) is None


@pytest.mark.parametrize(("own", "words"), [
    ({"address": "nowhere"}, "HOST:PORT"),
    ({"address": "h:1", "on_failure": "shrug"}, "shrug"),
    ({"address": "h:1", "timeout_seconds": "soon"}, "soon"),
    ({"address": "h:1", "timeout_seconds": 0}, "more than 0"),
    ({"address": "h:1", "world_seconds": "later"}, "world_seconds: got 'later'"),
    ({"address": "h:1", "world_seconds": -1}, "world_seconds: got -1.0, expected more than 0"),
    ({"address": "h:1", "color": "red"}, "color"),
    (7, "expected HOST:PORT"),
])  # fmt: skip
def test_bad_settings_are_refused(own, words):
    with pytest.raises(ConfigError, match=words):
        configured({"lora_server": own}, {})


def test_supported_versions():
    for good in ("0.32.0", "0.33.1+cpu"):
        SUPPORTED.check_version(good)
    for bad in ("0.31.9", "0.34.0rc1", "1.0", "dev"):
        with pytest.raises(ConfigError, match=r">=0\.32,<0\.34"):
            SUPPORTED.check_version(bad)


@pytest.mark.parametrize(("dtype", "has_amx", "granted", "asked", "refused"), [
    (torch.bfloat16, False, False, False, False),
    (torch.bfloat16, True, True, True, False),
    (torch.bfloat16, True, False, True, True),
    (torch.float16, True, False, True, True),
    (torch.float32, True, False, True, False),
])  # fmt: skip
def test_amx_is_asked_for_where_there_is_some(dtype, has_amx, granted, asked, refused):
    calls = []

    def ask():
        calls.append(None)
        return granted

    with pytest.raises(ConfigError, match="start it with --dtype float32") if refused else contextlib.nullcontext():
        ask_for_amx(dtype, lambda: has_amx, ask)
    assert bool(calls) == asked


def test_amx_is_asked_for_on_this_processor():
    """By torch's own functions, which have to be there."""
    refused = torch.cpu._is_amx_tile_supported() and not torch.cpu._init_amx()
    with pytest.raises(ConfigError) if refused else contextlib.nullcontext():
        ask_for_amx(torch.bfloat16)


@pytest.mark.parametrize(("flags", "environment", "space"), [
    ([], {}, "4"),
    (["--max-model-len", "512"], {"VLLM_CPU_KVCACHE_SPACE": "9"}, "9"),
    (["--gpu-memory-utilization", "0.5"], {}, None),
    (["--kv-cache-memory-bytes=2G"], {}, None),
])  # fmt: skip
def test_serve_vllm_takes_little_of_a_shared_machine(flags, environment, space):
    """vLLM's own default is 0.92 of it, and the environment would win over its flags."""
    assert engine_environment(flags, environment, "h:1").get("VLLM_CPU_KVCACHE_SPACE") == space


def test_graphs_are_captured_between_exchanges():
    config = SimpleNamespace(splitting_ops=None, _attention_ops=["vllm::attention"])
    split = split_graphs(config)
    assert split.splitting_ops[:3] == ["vllm::attention", "lora_server::push", "lora_server::add_"]
    assert "vllm::moe_forward" in split.splitting_ops
    assert split_graphs(split).splitting_ops == split.splitting_ops


def test_flags_are_read_back():
    assert parse_flag(Failure("step", "shard 1: a: b").flag("error")) == ("error", "step", "shard 1: a: b")
    assert parse_flag("a stop word") is parse_flag(7) is None


@pytest.fixture(scope="module", params=["host", pytest.param("device", marks=pytest.mark.emulator)])
def served(request, tmp_path_factory):
    """Activations in host memory, or on a device that routes them itself (which is this CPU: emulated_link)."""
    load, emulated = workload("mixtral"), partial(EmulatedServer, tmp_path_factory.mktemp("shards"), mirror="no")
    make = emulated if request.param == "device" else InprocServer
    with contextlib.closing(make(load.spec, load.paths, layout="ep2-pp2", max_step_rows=24)) as server:
        yield load, server


@pytest.fixture
def forward(served):
    """Rows: 2 of the base model, 3 of `fused`, 2 of an adapter that begins at position 11."""
    _, server = served
    forward = PlannedPass(Client(server))
    rows = {"b": Assigned(server.held["fused"].handle, 0), "c": Assigned(server.held["experts"].handle, 11)}
    forward.receive(StepPlan("", rows, tuple(server.held.values())))
    forward.begin(["a", "b", "c"], [2, 3, 2], [0, 5, 10])
    yield forward
    forward.close()


def expert_weights(load, name, layer, projection):
    """Deltas [E, out, in] by definition, from the adapter's own tensors."""
    site = Site(layer, projection)
    out = torch.zeros(load.spec.experts, load.spec.out_width(site), load.spec.in_width(site))
    with open_adapter(load.paths[name], load.spec) as adapter:
        for expert in adapter.experts(site):
            for pair, a, b in adapter.read(site, expert):
                out[expert, pair.out_begin : pair.out_end] += pair.scale * (b.float() @ a.float())
    return out


def test_only_rows_from_the_start_on_take_part(forward):
    assert sorted(forward.sites.batch.rows_R.tolist()) == [2, 3, 4, 6]
    assert forward.sites.active and not forward.sites.batch.decode


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize("rank", [None, 0, 1])
@pytest.mark.parametrize("expert_map", [None, [0, 1, 2, 3, -1, -1, -1, -1]])
def test_experts_equal_the_definition(served, forward, rank, expert_map, device):
    """As vLLM's own kernels call it, of a whole layer, of half its columns, of half its experts."""
    load, _ = served
    layer, ffn, hidden = 1, load.spec.ffn, load.spec.hidden
    begin, end = (0, ffn) if rank is None else (rank * ffn // 2, (rank + 1) * ffn // 2)
    up, down = Window(0, ((begin, end), (ffn + begin, ffn + end))), Window(begin, ((0, hidden),))
    remote = RemotePunica(forward, layer, up, down, end - begin)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(TOKENS, hidden, generator=generator)
    act = torch.randn(TOKENS * 2, end - begin, generator=generator)
    ids = torch.stack([torch.randperm(8, generator=generator)[:2] for _ in range(TOKENS)])
    weights = torch.rand(TOKENS, 2, generator=generator)
    here = None if expert_map is None else torch.tensor(expert_map)

    there = [t if t is None else t.to(device) for t in (x, act, ids, weights, here)]
    y13 = torch.zeros(TOKENS, 2, 2 * (end - begin), device=device)
    carried = remote.add_lora_w13(y13, there[0], (), (), there[2], there[3], there[4], None, None, TOKENS, 2)
    y2 = torch.zeros(TOKENS, 2, hidden, device=device)
    remote.add_lora_w2(y2, there[1], (), (), there[3], *carried)
    y13, y2 = y13.cpu(), y2.cpu()

    expected13, expected2 = torch.zeros_like(y13), torch.zeros(TOKENS, hidden)
    for row, name in {2: "fused", 3: "fused", 4: "fused", 6: "experts"}.items():
        up, down = (expert_weights(load, name, layer, projection) for projection in ("gate_up", "down"))
        columns = [*range(begin, end), *range(ffn + begin, ffn + end)]
        for place, expert in enumerate(ids[row].tolist()):
            if here is not None and here[expert] < 0:
                continue
            expected13[row, place] = up[expert][columns] @ x[row]
            expected2[row] += weights[row, place] * (down[expert][:, begin:end] @ act[2 * row + place])
    assert torch.allclose(y13, expected13, atol=1e-4)
    assert torch.allclose(y2.sum(1), expected2, atol=1e-4)
    assert forward.end() == {}


def gate_up(served, forward, x, **options):
    """What is added by all experts of layer 0."""
    load, _ = served
    ffn, hidden = load.spec.ffn, load.spec.hidden
    remote = RemoteExperts(forward, 0, Window(0, ((0, 2 * ffn),)), Window(0, ((0, hidden),)), ffn)
    ids = torch.randint(0, 8, (len(x), 2), generator=torch.Generator().manual_seed(5))
    added = torch.zeros(len(x) * 2, 2 * ffn)
    remote.finish_gate_up(remote.start_gate_up(x, ids, None), added, **options)
    return added


def test_interleaved_columns(served, forward):
    load, _ = served
    x, ffn = torch.randn(TOKENS, load.spec.hidden), load.spec.ffn
    halves, alternating = gate_up(served, forward, x), gate_up(served, forward, x, interleaved=True)
    assert halves.abs().sum() > 0
    assert torch.equal(alternating[:, 0::2], halves[:, :ffn]) and torch.equal(alternating[:, 1::2], halves[:, ffn:])


def linear(served, forward):
    load, _ = served
    site = Site(2, "qkv")
    layer = nn.Linear(load.spec.in_width(site), load.spec.out_width(site))
    remote = RemoteLinear(forward, site, Window(0, ((0, load.spec.out_width(site)),)))
    return layer, remote.around(lambda layer, x, bias: nn.functional.linear(x, layer.weight, bias))


def call(served, forward, projection, rows=TOKENS):
    """A layer's own function; whether anything was added to its plain result."""
    if projection == "gate_up":
        return bool(gate_up(served, forward, torch.randn(rows, served[0].spec.hidden)).any())
    layer, apply = linear(served, forward)
    x = torch.randn(rows, layer.in_features)
    return not torch.equal(apply(layer, x, layer.bias), layer(x))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_opaque_ops_survive_a_full_graph(served, forward, device):
    """Eager and compiled give the same; without adapter rows it is the plain GEMM, bit for bit."""
    torch.manual_seed(3)
    layer, apply = linear(served, forward)
    layer.to(device)
    x = torch.randn(TOKENS, layer.in_features, device=device)
    plain = layer(x)
    eager = apply(layer, x, layer.bias)
    changed = (eager - plain).abs().sum(1) > 1e-3
    assert changed.tolist() == [False, False, True, True, True, False, False], "`experts` has nothing at qkv"
    compiled = torch.compile(lambda x: apply(layer, x, layer.bias), fullgraph=True, backend="aot_eager")
    assert torch.allclose(compiled(x), eager, atol=1e-5)
    forward.end()
    assert torch.equal(apply(layer, x, layer.bias), plain)
    assert torch.equal(compiled(x), plain)


def test_a_failed_step_leaves_the_pass_running(served, forward):
    """No exception reaches the engine; the requests with rows are named, and the next step works again."""
    assert call(served, forward, "qkv")
    forward.client.give_up(errors.StepError("it broke"))
    assert not call(served, forward, "qkv")
    assert codes(forward) == {"b": "step", "c": "step"}
    check_next_step(served, forward)


def codes(forward):
    return {name: failure.code for name, failure in forward.end().items()}


def check_next_step(served, forward):
    """Of a request of a good adapter: it is served."""

    def is_served():
        forward.receive(StepPlan("", {"b": Assigned(served[1].held["fused"].handle, 0)}))
        forward.begin(["b"], [TOKENS], [0])
        acted, failures = call(served, forward, "qkv"), forward.end()
        return acted and not failures

    until(is_served, "a client that was given up has joined again")


def test_handles_of_another_run_or_that_were_not_announced_are_not_used(served, forward):
    held = served[1].held
    for run, handle, code in (("another run", held["fused"].handle, "shard_unavailable"), ("", 999, "unknown_adapter")):
        forward.receive(StepPlan(run, {"b": Assigned(handle, 0)}, tuple(held.values())))
        forward.begin(["b"], [3], [0])
        assert not forward.sites.active and codes(forward) == {"b": code}


@pytest.mark.parametrize("projection", ["qkv", "gate_up"])
def test_a_bad_adapter_fails_its_requests_and_no_other(served, forward, projection):
    """The step is void for all, but the others' requests start over."""
    good = served[1].held["fused"]
    bad = dataclasses.replace(good, handle=999)
    for shard in served[1].shards:
        shard.store.adapters.drop(999)  # so that no step waits for it
    forward.receive(StepPlan("", {"g": Assigned(good.handle, 0), "b": Assigned(999, 0)}, (bad,)))
    forward.begin(["g", "b"], [2, 2], [0, 0])
    call(served, forward, projection, rows=4)
    assert codes(forward) == {"g": "retry", "b": "unknown_adapter"}
    check_next_step(served, forward)


def test_what_may_succeed_later_is_told_from_what_will_not():
    """A gateway tries a 503 again, and nothing else."""
    passing = "ServerUnavailable", "Lease", "ShardUnavailable", "StepTimeout"
    lasting = "UnknownAdapter", "AdapterLoad", "GeometryMismatch", "Config"
    passes = {name: Failure.of(getattr(errors, f"{name}Error")("")).passes for name in passing + lasting}
    assert passes == dict.fromkeys(passing, True) | dict.fromkeys(lasting, False)
    assert not Failure("not_invoked", "").passes


def test_failing_steps_are_one_line_and_then_counted(forward):
    with capture_logs() as lines:
        for _ in range(200):
            forward.failures.fail(errors.ShardUnavailableError("shard 1: closed"))
            forward.receive(StepPlan())
    assert [line["event"] for line in lines] == ["adapter rows failed"]


def test_a_lost_server_is_joined_anew_in_the_background_which_is_logged_when_it_begins_and_ends():
    away = threading.Event()
    away.set()

    def join():
        if away.is_set():
            raise errors.ServerUnavailableError("away")

    reconnector = Reconnector(join, "worker")
    with capture_logs() as lines:
        for _ in range(20):
            assert not reconnector.wait(0.0)
        away.clear()
        assert reconnector.wait(10)
    assert [line["event"] for line in lines] == ["LoRA server lost; joining it again", "rejoined"]
    assert lines[1]["process"] == "worker" and lines[1]["away_seconds"] >= 0
    hopeless = Reconnector(lambda: (_ for _ in ()).throw(errors.GeometryMismatchError("another model")))
    with pytest.raises(errors.GeometryMismatchError):
        hopeless.wait(10)


@pytest.mark.parametrize("projection", ["qkv", "gate_up"])
def test_few_calls_lie_between_a_layer_and_the_push(served, forward, projection, monkeypatch):
    """What a decoding step pays per site in Python: the layer's own function and at most five more."""
    link_type, frames = type(forward.client.session.links[0]), []
    push = link_type.push

    def counted(self, seq, nbytes):
        own = [one for one in inspect.stack()[1:] if "/client_connector/" in one.filename]
        frames.append([one.function for one in own])
        push(self, seq, nbytes)

    monkeypatch.setattr(link_type, "push", counted)
    call(served, forward, projection)
    assert frames and max(len(one) for one in frames) <= 5, frames
