"""Rows to messages by a literal oracle, a Client over InprocServer against scale * B (A x), and StepTables."""

import functools
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from client_connector.client import Client
from client_connector.packing import Activations, HostPacker
from client_connector.routing import Batch, Run, in_step, route_dense, route_experts
from client_connector.serving.tables import NOBODY, StepTables
from lora_server.adapters import open_adapter
from lora_server.demo.inproc import InprocServer
from lora_server.errors import ConfigError
from lora_server.placement import share
from lora_server.spec import Site
from lora_server.wire.terms import Held
from tests.support.workload import spec_of

SITE = Site(2, "gate_up")
# largest error of a delta relative to the largest that rounding could reach
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-8 + 2e-6, torch.float16: 2**-11 + 2e-6}


@st.composite
def batches(draw):
    """(held per row or None, keep or None, Batch): handles in no order, some without SITE."""
    held = [
        Held(f"a{handle}", handle, frozenset({SITE} if draw(st.booleans()) else {Site(0, "o")}))
        for handle in draw(st.lists(st.integers(1, 40), min_size=1, max_size=5, unique=True))
    ]
    held_T = draw(st.lists(st.sampled_from([None, *held]), min_size=1, max_size=24))
    keep_T = draw(st.one_of(st.none(), st.lists(st.booleans(), min_size=len(held_T), max_size=len(held_T))))
    keep = None if keep_T is None else torch.tensor(keep_T)
    return held_T, keep_T, Batch.of(runs_of(held_T), draw(st.booleans()), keep)


def runs_of(held_T):
    return [Run.of(held, row, 1) for row, held in enumerate(held_T) if held is not None]


def wanted_rows(held_T, keep_T, site):
    """Row -> handle, of the rows that must travel."""
    kept = keep_T or [True] * len(held_T)
    return {
        row: held.handle
        for row, (held, keep) in enumerate(zip(held_T, kept, strict=True))
        if keep and held is not None and site in held.sites
    }


def check_message(message, handle_of, max_entries):
    """What every message promises, whatever the routing."""
    rows, entries = message.rows_M.tolist(), len(message.pairs_P)
    assert message.segments_S4.dtype == np.int32 and message.segments_S4.shape[1] == 4
    assert 1 <= entries <= max_entries and len(set(rows)) == len(rows) <= entries
    assert set(rows) <= set(handle_of), "a base row, or padding, travels"
    keys = [(handle, expert) for handle, expert, _, _ in message.segments_S4.tolist()]
    assert keys == sorted(set(keys)), "segments are sorted, and each pair is there once"
    first = 0
    for _, _, begin, count in message.segments_S4.tolist():
        assert begin == first and count >= 1
        first += count
    assert first == entries
    positions = range(entries) if message.map_N is None else message.map_N.tolist()
    assert set(positions) == set(range(len(rows)))
    for handle, _, begin, count in message.segments_S4.tolist():
        for i in range(begin, begin + count):
            assert handle_of[rows[positions[i]]] == handle
            yield i, rows[positions[i]]


@settings(deadline=None, max_examples=100)
@given(batch=batches(), max_entries=st.integers(1, 9), shard=st.integers(0, 3))
def test_dense_messages_cover_each_row_once(batch, max_entries, shard):
    held_T, keep_T, whole = batch
    handle_of, part, seen = wanted_rows(held_T, keep_T, SITE), whole and whole.at(SITE), Counter()
    assert (part is None) == (not handle_of)
    for message in route_dense(part, shard, max_entries) if part else []:
        assert message.shard == shard and message.map_N is None
        assert torch.equal(message.pairs_P, message.rows_M)
        seen.update(row for _, row in check_message(message, handle_of, max_entries))
        assert all(expert == 0 for _, expert, _, _ in message.segments_S4.tolist())
    assert seen == dict.fromkeys(handle_of, 1)


@settings(deadline=None, max_examples=150)
@given(batch=batches(), ep=st.integers(1, 5), experts=st.integers(1, 8), seed=st.integers(0, 2**31), data=st.data())
def test_expert_messages_cover_each_row_and_expert_once(batch, ep, experts, seed, data):
    held_T, keep_T, whole = batch
    top_k = data.draw(st.integers(1, experts))
    max_entries = data.draw(st.integers(top_k, 12))
    generator, absent = torch.Generator().manual_seed(seed), data.draw(st.sampled_from([0, 0, 2]))
    scores = torch.rand(len(held_T), experts + absent, generator=generator)
    experts_Tk = scores.topk(top_k, dim=1).indices  # ids of `experts` and more mean "not here"
    owners = [3 + rank for rank in range(ep) for _ in share(experts, ep, rank)]
    handle_of, part = wanted_rows(held_T, keep_T, SITE), whole and whole.at(SITE)
    messages = route_experts(part, experts_Tk, torch.tensor(owners), max_entries) if part else []
    seen, homes = Counter(), {}
    for number, message in enumerate(messages):
        expert_of = {
            i: expert for _, expert, begin, count in message.segments_S4.tolist() for i in range(begin, begin + count)
        }
        for i, row in check_message(message, handle_of, max_entries):
            expert, entry = expert_of[i], int(message.pairs_P[i])
            assert entry // top_k == row and int(experts_Tk[row, entry % top_k]) == expert
            assert owners[expert] == message.shard
            assert homes.setdefault((row, message.shard), number) == number, "a row's entries travel together"
            seen[row, expert] += 1
    wanted = Counter((row, e) for row in handle_of for e in experts_Tk[row].tolist() if e < experts)
    assert seen == wanted
    stage = range(3, 3 + ep)
    padded = in_step(messages, stage)
    counts = Counter(message.shard for message in padded)
    assert len({counts[shard] for shard in stage}) == 1 and len(padded) >= len(messages)
    assert [id(m) for s in stage for m in messages if m.shard == s] == [id(m) for m in padded if len(m.rows_M)]
    assert all(not len(m.segments_S4) and not len(m.pairs_P) for m in padded if not len(m.rows_M))


@functools.cache
def deltas(path):
    """(site, expert) -> (scale * B A in float64, the same of magnitudes)."""
    spec, found = spec_of("mixtral"), {}
    with open_adapter(path, spec) as adapter:
        for site in adapter.sites():
            for expert in adapter.experts(site):
                both = torch.zeros(2, spec.out_width(site), spec.in_width(site), dtype=torch.float64)
                for pair, a, b in adapter.read(site, expert):
                    both[0, pair.out_begin : pair.out_end] += pair.scale * (b.double() @ a.double())
                    both[1, pair.out_begin : pair.out_end] += pair.scale * (b.double().abs() @ a.double().abs())
                found[site, expert] = both
    return found


def exchange(client, batch, site, x, experts_Tk=None, weights=None, chunk=None):
    """What the engine's hook does at a site; returns the delta per row, or per entry for gate_up."""
    part, spec, top_k = batch and batch.at(site), client.terms.spec, 1 if experts_Tk is None else experts_Tk.shape[1]
    rows = len(x) if site.projection != "gate_up" else len(x) * top_k
    rows = rows // top_k if weights is not None else rows
    out = torch.zeros(rows, spec.out_width(site), dtype=torch.float64)
    if part is None:
        return out
    if experts_Tk is None:
        messages = route_dense(part, client.placement.owners(site)[0], chunk)
    else:
        messages = route_experts(part, experts_Tk, torch.tensor(client.placement.first_owners(site)), chunk)
    place = "pairs_P" if experts_Tk is not None and weights is None else "rows_M"
    given = Activations(x=x, decode=part.decode, by_pair=weights is not None, weights=weights)
    pending = client.start(HostPacker(client.terms, site, given), messages)
    pending.finish(lambda message, delta: out.index_add_(0, getattr(message, place), delta.double()))
    return out


def assert_close(got, expected, bound, dtype):
    error = (got - expected).abs()
    assert (error <= TOLERANCE[dtype] * bound + 1e-6 * (dtype != torch.float32) + 1e-30).all(), (
        f"error {error.max():.3g}, largest value {expected.abs().max():.3g}"
    )


@pytest.fixture(scope="module")
def make_client(tiny_adapters):
    servers = {}

    def make(layout, max_step_rows):
        if (layout, max_step_rows) not in servers:
            rules = {"layout": layout, "max_step_rows": max_step_rows, "slots": 2}
            server = InprocServer(spec_of("mixtral"), tiny_adapters, **rules)
            servers[layout, max_step_rows] = server, Client(server)
        return servers[layout, max_step_rows][1]

    yield make
    for server, client in servers.values():
        client.close()
        server.close()


LAYOUTS = ["ep1-pp1", "ep2-pp2", "ep3-pp2", "ep1-pp4", "ep4-pp1"]


@settings(deadline=None, max_examples=40)
@given(data=st.data(), seed=st.integers(0, 2**31), layout=st.sampled_from(LAYOUTS), chunk=st.sampled_from([2, 5, 64]))
def test_a_client_gets_the_literal_sum(data, seed, layout, chunk, make_client, tiny_adapters):
    client, spec, top_k = make_client(layout, chunk), spec_of("mixtral"), 2
    names = data.draw(st.lists(st.sampled_from([None, *sorted(tiny_adapters)]), min_size=1, max_size=11))
    dtype = data.draw(st.sampled_from(list(TOLERANCE)))
    layer = data.draw(st.integers(0, spec.layers - 1))
    known = sorted({name for name in names if name})
    held = dict(zip(known, client.acquire(known), strict=True))
    batch = Batch.of(runs_of([held.get(name) for name in names]), decode=data.draw(st.booleans()))
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape):
        return torch.randn(shape, generator=generator)

    def literal(site, x, row, expert=0):
        """[delta, magnitude] of one row at one expert."""
        both = deltas(tiny_adapters[names[row]]).get((site, expert)) if names[row] else None
        if both is None:
            return torch.zeros(2, spec.out_width(site), dtype=torch.float64)
        return torch.stack([both[0] @ x.double(), both[1] @ x.double().abs()])

    experts_Tk = torch.rand(len(names), spec.experts, generator=generator).topk(top_k, dim=1).indices
    entries = [(row, place, int(experts_Tk[row, place])) for row in range(len(names)) for place in range(top_k)]
    site, x = Site(layer, "gate_up"), noise(len(names), spec.hidden).to(dtype)
    expected = torch.stack([literal(site, x[row], row, expert) for row, _, expert in entries])
    assert_close(exchange(client, batch, site, x, experts_Tk, chunk=chunk), expected[:, 0], expected[:, 1], dtype)

    site, x, weights = Site(layer, "down"), noise(len(entries), spec.ffn).to(dtype), noise(len(entries))
    expected = torch.zeros(2, len(names), spec.hidden, dtype=torch.float64)
    for (row, place, expert), weight in zip(entries, weights.double(), strict=True):
        both = literal(site, x[row * top_k + place], row, expert)
        expected[0, row] += weight * both[0]
        expected[1, row] += weight.abs() * both[1]
    assert_close(exchange(client, batch, site, x, experts_Tk, weights, chunk), *expected, dtype)

    for site in (Site(layer, "qkv"), Site(layer, "o")):
        x = noise(len(names), spec.in_width(site)).to(dtype)
        expected = torch.stack([literal(site, x[row], row) for row in range(len(names))])
        assert_close(exchange(client, batch, site, x, chunk=chunk), expected[:, 0], expected[:, 1], dtype)
    client.release(list(held.values()))


ROWS, MOST = 12, 3
SITES = [Site(layer, projection) for layer in range(2) for projection in ("qkv", "gate_up")]
HELD = [Held(f"a{i}", 65537 + 7 * i, frozenset(SITES[i % 3 :: 2]), "v", None) for i in range(6)]


def tables() -> StepTables:
    return StepTables(SITES, ROWS, MOST, torch.device("cpu"))


def meant(step: StepTables, site: Site) -> list[int | None]:
    """The handle of each row with a delta there."""
    found = []
    for place in step.adapters_HT[0].tolist():
        handle, first, here = (0, 0, 0) if place == NOBODY else step.directory(site)[place].tolist()
        assert first == 0 and here in (0, 1)
        found.append(handle if here else None)
    return found


def addresses(step: StepTables) -> list[int]:
    return [step.adapters_HT.data_ptr(), *(step.directory(site).data_ptr() for site in SITES)]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 4)), max_size=3), max_size=8))
def test_every_pass_is_what_its_batch_says_at_the_same_addresses(passes):
    step = tables()
    before = addresses(step)
    for requests in passes:
        runs, first = [], 0
        for index, count in requests:
            runs.append(Run.of(HELD[index], first, min(count, ROWS - first)))
            first = min(ROWS, first + count + 1)  # rows of the base model between them
        step.write(Batch.of(runs, decode=False))
        for site in SITES:
            wanted: list[int | None] = [None] * ROWS
            for ((held, _),), begin, count in runs:
                wanted[begin : begin + count] = [held.handle if site in held.sites else None] * count
            assert meant(step, site) == wanted
    assert addresses(step) == before


def test_a_handle_of_another_run_may_have_other_sites():
    step, other = tables(), Held("b", HELD[0].handle, frozenset(SITES[1:]), "v", None)
    step.write(Batch.of([Run.of(HELD[0], 0, 1)], decode=True))
    step.forget()
    step.write(Batch.of([Run.of(other, 0, 1)], decode=True))
    assert [meant(step, site)[0] for site in SITES] == [None, *[other.handle] * 3]


@pytest.mark.parametrize("runs", [runs_of(HELD[: MOST + 1]), [Run.of(HELD[0], ROWS, 1)]])
def test_what_does_not_fit_is_an_error(runs):
    step = tables()
    with pytest.raises(ConfigError, match="expected at most"):
        step.write(Batch.of(runs, decode=False))
    step.write(None)
    assert meant(step, SITES[0]) == [None] * ROWS
    step.write(Batch.of([Run.of(HELD[0], 0, ROWS)], decode=False))
    assert meant(step, SITES[0]) == [HELD[0].handle] * ROWS
