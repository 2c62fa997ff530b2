"""Rows with several adapters, each with a weight, against the sum of weight * scale * B (A x) in float64, also at sites
with other rows than the pass."""

import functools
import itertools

import pytest
import torch

from client_connector.client import Client
from client_connector.forward_pass import ForwardPass
from client_connector.routing import Batch, Run, route_dense, route_experts
from client_connector.serving.tables import StepTables
from lora_server.adapters import open_adapter
from lora_server.demo.inproc import InprocServer
from lora_server.errors import ConfigError
from lora_server.spec import Site
from lora_server.wire.terms import Held
from tests.support.gpu.emulated_link import EmulatedServer
from tests.support.workload import workload

LAYER, ROWS, TOP_K = 1, 9, 2
# each row's (adapter, weight) segments; row 0 is the base model's
SEGMENTS = {
    "mixtral": [(), *[(("fused", 1.0), ("experts", -1.0))] * 3, *[(("fused", 1.0),)] * 2,
                *[(("gate-up", 0.5), ("fused", 2.0), ("attention", -1.5))] * 2, (("experts", -2.0),)],
    "llama": [(), *[(("fused", 1.0), ("mlp", -1.0))] * 3, *[(("fused", 1.0),)] * 2,
              *[(("qv", 0.5), ("fused", 2.0), ("attention", -1.5))] * 2, (("mlp", -2.0),)],
}  # fmt: skip


@functools.cache
def matrix(kind, name, site, expert=0):
    """An adapter's delta of the weight [out, in], in float64; None where it has none."""
    load = workload(kind)
    out = torch.zeros(load.spec.out_width(site), load.spec.in_width(site), dtype=torch.float64)
    with open_adapter(load.paths[name], load.spec) as adapter:
        for pair, a, b in adapter.read(site, expert) if site in adapter.sites() else ():
            out[pair.out_begin : pair.out_end] += pair.scale * (b.double() @ a.double())
    return out


def wanted(kind, row, x, site, expert=0):
    """What the segments of a row of the pass add there; row -1 is none."""
    segments = SEGMENTS[kind][row] if row >= 0 else ()
    parts = [weight * (matrix(kind, name, site, expert) @ x.double()) for name, weight in segments]
    return sum(parts, torch.zeros(workload(kind).spec.out_width(site), dtype=torch.float64))


# chunks of 3 entries part the segments of a row where they are more; the third routes on the device whatever it can
@pytest.fixture(scope="module", params=["whole", "chunks", pytest.param("device", marks=pytest.mark.emulator)])
def servers(request, tmp_path_factory):
    """A server by kind of model."""
    found = {}

    def serve(kind):
        if kind not in found:
            load, rows = workload(kind), 3 if request.param == "chunks" else 64
            emulated = functools.partial(EmulatedServer, tmp_path_factory.mktemp("shards"), mirror="no")
            make = emulated if request.param == "device" else InprocServer
            found[kind] = make(load.spec, load.paths, layout="ep2-pp2", max_step_rows=rows)
        return found[kind]

    yield serve
    for server in found.values():
        server.close()


@pytest.fixture(params=["mixtral", "llama"])
def forward(request, servers):
    """A pass whose rows have the SEGMENTS of a model."""
    server = servers(request.param)
    client = Client(server)
    forward = ForwardPass(client)
    forward.kind = request.param
    rows = [tuple((server.held[name], weight) for name, weight in one) for one in SEGMENTS[request.param]]
    forward.batch = Batch.of([Run(one, row, 1) for row, one in enumerate(rows)], decode=False)
    yield forward
    client.close()


@pytest.fixture(params=[list(range(ROWS)), [3, 1, 1, 7, -1, 0, 8, 4, 2, 6, 1]], ids=["rows", "map"])
def row_map(request):
    """The pass's row of each row of a site: dispatched ones are there several times, or not at all."""
    return request.param


def told(row_map):
    """What the engine says of it: nothing, where they are the pass's."""
    return None if row_map == list(range(ROWS)) else torch.tensor(row_map)


def noise(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def added(forward, started, out, place="rows_M"):
    """`out` with the answer added, each row of which is named once per message."""

    def add(message, delta):
        rows = getattr(message, place)
        assert len(rows) == len(rows.unique())
        out.index_add_(0, rows, delta.double())

    forward.finish(started, add)
    return out


@pytest.mark.parametrize("projection", ["qkv", "o", "gate_up", "down"])
def test_dense_and_attention_sites_add_the_weighted_sum(forward, projection, row_map):
    spec, site = forward.client.terms.spec, Site(LAYER, projection)
    if not spec.is_dense(site):
        pytest.skip("an expert site")
    x = noise(len(row_map), spec.in_width(site))
    expected = torch.stack([wanted(forward.kind, row, x[i], site) for i, row in enumerate(row_map)])
    got = added(forward, forward.start_dense(site, x, None, told(row_map)), torch.zeros_like(expected))
    assert expected[1].abs().max() > 0.1 and torch.allclose(got, expected, atol=1e-4)


@pytest.fixture
def chosen(forward, row_map):
    spec = forward.client.terms.spec
    if spec.is_dense(Site(LAYER, "gate_up")):
        pytest.skip("a model without experts")
    experts_Tk = noise(len(row_map), spec.experts).topk(TOP_K, dim=1).indices
    experts_Tk[2, 1] = spec.experts  # of another rank
    return experts_Tk


def pairs(experts_Tk, experts):
    every = [(row, place, int(experts_Tk[row, place])) for row in range(len(experts_Tk)) for place in range(TOP_K)]
    return [pair for pair in every if pair[2] < experts]


def test_gate_up_adds_the_weighted_sum_to_each_pair_of_row_and_expert(forward, chosen, row_map):
    spec, site = forward.client.terms.spec, Site(LAYER, "gate_up")
    x = noise(len(row_map), spec.hidden)
    expected = torch.zeros(len(row_map) * TOP_K, spec.out_width(site), dtype=torch.float64)
    for row, place, expert in pairs(chosen, spec.experts):
        expected[row * TOP_K + place] = wanted(forward.kind, row_map[row], x[row], site, expert)
    started = forward.start_experts(site, chosen, x, pass_rows_T=told(row_map))
    got = added(forward, started, torch.zeros_like(expected), "pairs_P")
    assert expected.abs().max() > 0.1 and torch.allclose(got, expected, atol=1e-4)


def test_down_weighs_the_sum_by_the_router_too(forward, chosen, row_map):
    spec, site = forward.client.terms.spec, Site(LAYER, "down")
    x, weights = noise(len(row_map) * TOP_K, spec.ffn), noise(len(row_map) * TOP_K).abs()
    expected = torch.zeros(len(row_map), spec.hidden, dtype=torch.float64)
    for row, place, expert in pairs(chosen, spec.experts):
        pair = row * TOP_K + place
        expected[row] += weights[pair].double() * wanted(forward.kind, row_map[row], x[pair], site, expert)
    started = forward.start_experts(site, chosen, x, weights, pass_rows_T=told(row_map))
    got = added(forward, started, torch.zeros_like(expected))
    assert expected.abs().max() > 0.1 and torch.allclose(got, expected, atol=1e-4)


def test_an_adapter_and_its_negative_cancel(forward):
    site, (held, *_) = Site(LAYER, "qkv"), forward.batch.held
    forward.batch = Batch.of([Run(((held, 1.0), (held, -1.0)), 0, ROWS)], decode=True)
    width = forward.client.terms.spec.out_width(site)
    started = forward.start_dense(site, noise(ROWS, forward.client.terms.spec.hidden))
    assert added(forward, started, torch.zeros(ROWS, width).double()).abs().max() < 1e-6


HELD = [Held(name, 7 + index, frozenset({Site(LAYER, "qkv")})) for index, name in enumerate("ab")]


def test_a_row_is_sent_once_for_all_its_segments():
    both = Batch.of([Run(tuple((one, 1.0) for one in HELD), 0, ROWS)], decode=True)
    zeros = torch.zeros(ROWS, 1, dtype=torch.int64)
    for messages in (route_dense(both, 0, 2 * ROWS), route_experts(both, zeros, zeros[0], 2 * ROWS)):
        (message,) = messages
        assert len(message.rows_M) == len(message.pairs_P) == ROWS
        assert len(message.map_N) == len(message.pair_N) == 2 * ROWS


@pytest.mark.parametrize("most", [2, 3, 8])
def test_a_batch_is_cut_between_rows_so_that_each_travels_once(most):
    """Four rows of the base model, whose one segment is `b`, and five of `a`, which have both."""
    (cold, hot), experts_T1 = HELD, torch.zeros(ROWS, 1, dtype=torch.int64)
    batch = Batch.of([Run(((hot, -1.0),), 0, 4), Run(((cold, 1.0), (hot, -1.0)), 4, 5)], decode=False)
    for messages in (route_dense(batch, 0, most), route_experts(batch, experts_T1, experts_T1[0], most)):
        assert sorted(torch.cat([one.rows_M for one in messages]).tolist()) == list(range(ROWS))
        entries = [len(one.map_N) for one in messages]
        assert sum(entries) == 4 + 2 * 5 and max(entries) <= most
        assert all(pair[0] + pair[1] > most - 1 for pair in itertools.pairwise(entries)), "no message for a row or two"


def test_dense_sites_with_one_owner_share_their_messages():
    batch = Batch.of([Run.of(HELD[0], 0, ROWS)], decode=True)
    first = route_dense(batch, 0, ROWS)
    assert route_dense(batch, 0, ROWS) is first
    assert [one.shard for one in route_dense(batch, 1, ROWS)] == [1] and len(route_dense(batch, 0, ROWS - 1)) == 2


def test_rows_of_one_adapter_carry_no_maps_and_no_weights():
    (message,) = route_dense(Batch.of([Run(((HELD[0], 1.0),), 0, ROWS)], decode=True), 0, ROWS)
    assert message.map_N is message.pair_N is message.weights_N is None and message.pairs_P is message.rows_M


SEVERAL = tuple((one, 1.0) for one in HELD)


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("segments", [((HELD[0], 0.5),), SEVERAL, (*SEVERAL, (HELD[1], -1.0))])
def test_launches_refuse_rows_that_they_cannot_route(segments, merged):
    """Their tables have one adapter per row, and one to subtract over merged weights."""
    tables = StepTables([Site(LAYER, "qkv")], ROWS, 4, torch.device("cpu"), merged)
    with pytest.raises(ConfigError, match="expected one adapter per row"):
        tables.write(Batch.of([Run(segments, 0, 2)], decode=True))


def test_launches_have_a_table_of_what_rows_subtract_over_merged_weights():
    (cold, hot), site = HELD, Site(LAYER, "qkv")
    tables = StepTables([site], ROWS, 4, torch.device("cpu"), merged=True)

    def handles():
        directory = tables.directory(site)[:, 0].tolist()
        return [[directory[place] if place >= 0 else 0 for place in half] for half in tables.adapters_HT.tolist()]

    tables.write(Batch.of([Run(((hot, -1.0),), 0, 4), Run(((cold, 1.0), (hot, -1.0)), 4, 3)], decode=True))
    assert handles() == [[0] * 4 + [cold.handle] * 3 + [0] * 2, [hot.handle] * 7 + [0] * 2]
    tables.write(Batch.of([Run(((hot, -1.0),), 2, 1)], decode=True))
    assert handles() == [[0] * ROWS, [0, 0, hot.handle, *[0] * 6]]
    tables.write(None)
    assert handles() == [[0] * ROWS] * 2 and not tables.live
