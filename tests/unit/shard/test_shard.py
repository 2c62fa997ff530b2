"""A real Shard over inproc links: what unknown, late, failing and large steps cost their client, and no other."""

import struct
import time
from types import SimpleNamespace

import pytest

from lora_server import errors
from lora_server.shard.receiver import UNREADABLE, WeightsPatience
from lora_server.shard.schedule import PendingStep
from lora_server.spec import Site
from lora_server.timings import Timings
from lora_server.transport.base import Grant
from lora_server.wire import slot
from tests.support.rig import LAYER0, LOADED, MAX_ROWS, SECONDS, Client, healthy, loaded_rig, make_rig
from tests.support.stores import load

pytestmark = pytest.mark.usefixtures("quiet")
ABSENT = 8


@pytest.fixture
def rig(request):
    rig = make_rig(**getattr(request, "param", {}))
    yield rig
    rig.gate.open()
    rig.shard.store.close()


@pytest.fixture
def loaded(rig, tiny_adapters):
    assert rig.load(LOADED, tiny_adapters["all"]).result() is None
    return rig


@pytest.mark.parametrize("word", [slot.signal(1, 2**40), slot.signal(1, 2**48 - 1)])
def test_wild_signals_cut_a_client_off_and_delay_no_other(loaded, word):
    """A client that signals beyond its slots breaks the contract; the others do not notice."""
    wild, good = Client(loaded.shard, 1), Client(loaded.shard, 2)
    wild.push(wild.request())
    wild.link.region.request_signal[0] = word
    for _ in range(5):
        healthy(good)
    assert [connection.grant.client for connection in loaded.shard.port.connections] == [2]


def test_an_unknown_handle_is_named(loaded):
    client, counters = Client(loaded.shard, 1), loaded.shard.counters
    failed, steps = counters.failed, counters.steps
    with pytest.raises(errors.UnknownAdapterError, match=rf"shard 0 client 1 slot 1 seq 1 .*handle {ABSENT}"):
        client.send(client.request(handle=ABSENT))
    healthy(client)
    assert (counters.failed, counters.steps) == (failed + 1, steps + 1)


def test_steps_are_counted_by_tenant(loaded):
    counts = loaded.shard.by_tenant
    before = {name: vars(counts.of(name)) | {} for name in ("acme", "rival")}
    acme, rival = Client(loaded.shard, 1, tenant="acme"), Client(loaded.shard, 2, tenant="rival")
    healthy(acme)
    healthy(acme)
    with pytest.raises(errors.UnknownAdapterError):
        rival.send(rival.request(handle=ABSENT))
    more = {name: {key: value - before[name][key] for key, value in vars(counts.of(name)).items()} for name in before}
    assert (more["acme"]["steps"], more["acme"]["failed"], more["rival"]["failed"]) == (2, 0, 1)
    assert min(more["acme"][key] for key in ("request_bytes", "response_bytes", "compute_ns", "wait_ns")) > 0
    assert sum(value for key, value in more["rival"].items() if key != "failed") == 0


@pytest.mark.parametrize("rig", [{"foreign_seconds": 0.05}], ids=["soon"], indirect=True)
def test_a_step_may_name_only_what_its_client_holds(loaded):
    """A forged handle reads no weights, delays no other client, and what is held is told in time."""
    port, forger, other = loaded.shard.port, Client(loaded.shard, 1), Client(loaded.shard, 2)
    port.hold(1, [], anew=True)
    with pytest.raises(errors.PermissionDeniedError, match=rf"shard 0 client 1 .*handle {LOADED}, which this client"):
        forger.send(forger.request())
    seq = forger.push(forger.request())
    healthy(other)
    port.hold(1, [LOADED])  # what it acquired is told a moment later
    forger.answer(seq)
    port.hold(1, [], [LOADED])
    with pytest.raises(errors.PermissionDeniedError):
        forger.send(forger.request())
    port.borrow(1, 2)  # as a worker does from its scheduler
    forger.send(forger.request())
    port.revoke(2)
    with pytest.raises(errors.PermissionDeniedError):
        forger.send(forger.request())
    port.hold(1, [LOADED])
    seq = forger.push(forger.request())
    loaded.shard.receiver.receive()
    struct.pack_into("<I", forger.link.region.request(seq), slot.HEADER_BYTES, ABSENT)  # the memory is the client's
    with pytest.raises(errors.ProtocolError, match="its segments changed after it was pushed"):
        forger.answer(seq)


def test_a_step_waits_for_the_commands_that_tell_of_its_adapter(loaded, tiny_adapters):
    """The controller answers a client before all shards have heard of the adapter, and of the hold."""
    port, early, other = loaded.shard.port, Client(loaded.shard, 1), Client(loaded.shard, 2)
    port.hold(1, [], anew=True)
    seq = early.push(early.request(handle=ABSENT))
    healthy(other)
    assert early.link.responded() == 0
    assert loaded.load(ABSENT, tiny_adapters["all"]).result() is None
    healthy(other)
    assert early.link.responded() == 0, "its client does not hold it yet"
    port.hold(1, [ABSENT])
    early.answer(seq)
    port.hold(1, [], [ABSENT])
    loaded.shard.store.adapters.drop(ABSENT)
    early.push(early.request(handle=ABSENT))
    assert loaded.shard.serve_once(), "what was dropped does not come: no other waits for its refusal"
    with pytest.raises(errors.UnknownAdapterError, match=f"handle {ABSENT}"):
        early.answer(seq + 1)


@pytest.mark.parametrize("rig", [{"foreign_seconds": 0.05}], ids=["soon"], indirect=True)
def test_a_handle_of_nothing_lets_no_step_past_what_its_client_does_not_hold(rig, tiny_adapters):
    """Neither one that was dropped, nor one that is no handle; nor is one that came again free to all."""
    assert load(rig.shard.store, LOADED, tiny_adapters["all"], eager=False).result() is None
    rig.shard.store.adapters.drop(ABSENT)
    forger = Client(rig.shard, 1)
    rig.shard.port.hold(1, [], anew=True)
    for other in (ABSENT, -1):
        step = forger.request()
        struct.pack_into("<i", step, slot.HEADER_BYTES, other)
        with pytest.raises(errors.PermissionDeniedError, match=f"handle {LOADED}, which this client"):
            forger.send(step)
    assert not rig.shard.store.report.layers_ready(LOADED), "nothing was loaded for it"
    assert rig.load(ABSENT, tiny_adapters["all"]).result() is None
    with pytest.raises(errors.PermissionDeniedError, match=f"handle {ABSENT}, which this client"):
        forger.send(forger.request(handle=ABSENT))


@pytest.mark.parametrize("rig", [{"foreign_seconds": 0.05}], ids=["soon"], indirect=True)
def test_a_step_of_an_adapter_that_the_shard_does_not_hear_of_is_refused(loaded):
    client = Client(loaded.shard, 1)
    loaded.shard.port.hold(1, [], anew=True)
    with pytest.raises(errors.UnknownAdapterError, match=rf"shard 0 client 1 .*handle {ABSENT}, which is unknown here"):
        client.send(client.request(handle=ABSENT))


@pytest.mark.parametrize("site", [LAYER0, Site(1, "gate_up"), Site(0, "qkv")])
def test_a_step_at_the_wrong_shard_is_refused_and_not_answered_with_zeros(site, tiny_adapters):
    owner = 2 * site.layer
    for index, rig in enumerate(make_rig("ep2-pp2", index) for index in range(4)):
        assert rig.load(LOADED, tiny_adapters["all"]).result() is None
        client = Client(rig.shard, 1)
        memory = client.request(site, maps=False, rows=1)
        if site.projection == "qkv":
            struct.pack_into("<I", memory, slot.HEADER_BYTES + 4, 0)
        if index == owner:
            client.send(memory)
        else:
            with pytest.raises(errors.ProtocolError, match="placements differ"):
                client.send(memory)
        rig.shard.store.close()


def test_a_step_waits_for_its_layer_while_others_are_served(loaded, tiny_adapters):
    rig = loaded
    rig.gate.shut(), rig.gate.arrived.clear()
    rig.load(ABSENT, tiny_adapters["all"])
    assert rig.gate.arrived.wait(SECONDS), "layer 0 is here, layer 1 is not"
    early, waits, other = (Client(rig.shard, client) for client in (1, 2, 3))
    early.send(early.request(handle=ABSENT))
    seq = waits.push(waits.request(Site(1, "gate_up"), handle=ABSENT))
    for _ in range(10):
        healthy(other)
    assert waits.link.responded() == 0
    rig.gate.open()
    waits.answer(seq)
    assert waits.send(waits.request(handle=ABSENT))[1] == early.send(early.request(handle=ABSENT))[1]


@pytest.mark.parametrize("ends", ["timeout", "drop", "failure", "leaves", "revoked"])
def test_how_a_wait_for_weights_ends(ends, rig, tiny_adapters, tmp_path):
    rig.gate.shut()
    path = tiny_adapters["all"]
    if ends == "failure":
        (tmp_path / "adapter_config.json").write_text("{}")
        rig.load(LOADED, tiny_adapters["down"])
        assert rig.gate.arrived.wait(SECONDS)
        path = tmp_path
    rig.load(ABSENT, path)
    assert rig.gate.arrived.wait(SECONDS)
    client = Client(rig.shard, 1)
    budget = 0.05 if ends == "timeout" else SECONDS
    began = time.monotonic()
    seq = client.push(client.request(Site(3, "down"), handle=ABSENT, maps=False, budget=budget))
    assert rig.shard.serve_once() is False
    if ends == "timeout":
        with pytest.raises(errors.AdapterNotLoadedError, match=rf"handles {ABSENT}: shard 0 client 1 .*still loading"):
            client.answer(seq)
        assert 0.9 * 0.05 <= time.monotonic() - began < 30
    elif ends == "drop":
        rig.shard.store.adapters.drop(ABSENT)
        with pytest.raises(errors.UnknownAdapterError, match=f"handle {ABSENT}"):
            client.answer(seq)
    elif ends == "failure":
        rig.gate.open()
        with pytest.raises(errors.AdapterError) as caught:
            client.answer(seq)
        assert isinstance(caught.value, errors.AdapterFormatError) and str(tmp_path) in str(caught.value)
    else:
        client.link.close() if ends == "leaves" else rig.shard.port.revoke(1)
        assert rig.shard.serve_once() is False and not rig.shard.receiver.pending
        if ends == "revoked":
            with pytest.raises(errors.ShardUnavailableError):
                client.answer(seq)


def test_a_step_that_does_not_wait_for_weights_is_refused_soon_and_names_the_adapters(rig, tiny_adapters):
    """Its client, and others', have their rows in the same message: an engine computes them again without that one."""
    rig.gate.shut()
    rig.load(ABSENT, tiny_adapters["all"])
    assert rig.gate.arrived.wait(SECONDS)
    client, at = Client(rig.shard, 1), Site(3, "down")
    began = time.monotonic()
    with pytest.raises(errors.AdapterNotLoadedError) as caught:
        client.send(client.request(at, handle=ABSENT, maps=False, waits=False))
    assert Timings.weights <= time.monotonic() - began < SECONDS / 2, "long before the step's budget"
    assert caught.value.handles == {ABSENT}, "as a client rebuilds it from the answer"
    with pytest.raises(errors.AdapterNotLoadedError):
        client.send(client.request(at, handle=ABSENT, maps=False, waits=False))
    assert time.monotonic() - began < SECONDS / 2
    rig.gate.open()
    client.send(client.request(at, handle=ABSENT, maps=False))


def step_at(seconds, budget=60.0, flags=0, client=1):
    received = round(seconds * 1e9)
    header, ends = UNREADABLE._replace(flags=flags), received + round(budget * 1e9)
    return PendingStep(SimpleNamespace(grant=Grant(client, 1, b"")), 1, header, received, ends)


def test_the_steps_of_a_pass_wait_for_weights_no_longer_than_one_step_may():
    """A layer every 40 ms: without a bound a pass of 16 layers takes as long as all of the load."""
    patience, now, waits = WeightsPatience(0.1), 100.0, []
    for _ in range(16):
        step = step_at(now)
        ended = min(now + 0.04, patience.ends_ns(step) * 1e-9)
        waits.append(ended - now)
        patience.note(step, round(ended * 1e9))
        now = ended
    assert sum(waits) == pytest.approx(0.1) and waits[-1] == 0.0
    assert patience.ends_ns(step_at(now, client=2)) * 1e-9 == pytest.approx(now + 0.1), "others have their own"
    assert patience.ends_ns(step_at(now + 0.06)) * 1e-9 == pytest.approx(now + 0.12), "time without a wait is regained"
    assert patience.ends_ns(step_at(now, 10.0, slot.WAITS_FOR_WEIGHTS)) * 1e-9 == pytest.approx(now + 9.0)


LARGE = MAX_ROWS // 2  # tokens of two entries each


@pytest.fixture
def shard(tiny_adapters):
    """A shard whose loop is the test's, and which looks for other steps after each part of one."""
    with loaded_rig(tiny_adapters["all"], turn_seconds=0.0) as rig:
        yield rig.shard


def push(client, rows):
    return client.push(client.request(rows=rows))


def answered(client, seq):
    return client.link.responded() >= seq


def begin(shard, client):
    """A large step, begun and no more."""
    seq = push(client, LARGE)
    assert shard.serve_once() and shard.serve_once()
    assert shard.receiver.pending[client.client].work is not None and not answered(client, seq)
    return seq


def finish(shard, client, seq):
    """The answer; how many turns it took."""
    turns = 0
    while not answered(client, seq):
        assert shard.serve_once()
        turns += 1
    return client.answer(seq)[1], turns


def test_a_small_step_passes_a_large_one_that_is_begun(shard):
    large, small = Client(shard, 1), Client(shard, 2)
    alone, _ = finish(shard, large, begin(shard, large))
    seq = begin(shard, large)
    passing = push(small, 1)
    while not answered(small, passing):
        assert shard.serve_once()
        assert not answered(large, seq), "the small one's answer is the first"
    passed, turns = finish(shard, large, seq)
    assert passed == alone and turns > 1, "not a bit of it is another, and it was not begun anew"
    later = begin(shard, large)
    same = push(small, LARGE)
    finish(shard, large, later)
    assert not answered(small, same), "what is as large waits"
    finish(shard, small, same)


@pytest.mark.parametrize("how", ["revoked", "closed", "joined anew"])
def test_a_client_that_goes_in_the_middle_of_its_step_leaves_nothing_behind(how, shard):
    large, small = Client(shard, 1), Client(shard, 2)
    begin(shard, large)
    if how == "revoked":
        shard.port.revoke(1)
    elif how == "closed":
        large.link.close()
    else:
        anew = Client(shard, 1, epoch=2)
        finish(shard, anew, push(anew, LARGE))
    finish(shard, small, push(small, 1))
    assert not shard.receiver.pending and shard.counters.failed == 0
    shard.store.adapters.drop(7)
    shard.store.report.check_integrity()


def test_no_more_than_a_few_are_begun(shard):
    """Each keeps its buffers: what would pass the last of them waits for it."""
    clients, seqs = [Client(shard, number) for number in range(1, 7)], []
    for client, rows in zip(clients, range(LARGE, 0, -1), strict=False):
        seqs.append(push(client, rows))
        assert shard.serve_once()
    begun = [number for number, step in shard.receiver.pending.items() if step.work is not None]
    assert begun == [1, 2, 3, 4]
    for client, seq in zip(clients, seqs, strict=True):
        finish(shard, client, seq)
