"""Situations of a client's kernels that schedules seldom reach: no answer, a failed pass, many steps in flight."""

from __future__ import annotations

import ctypes

import numpy as np

from lora_server.device.protocol.codes import LinkStatus
from lora_server.wire import slot
from tests.support.gpu.gpu_clients import BUDGET_NS
from tests.support.gpu.gpu_scene import Scene
from tests.support.gpu.gpu_shard import Waiting
from tests.support.gpu.gpu_weights import BODIES, DEPTH
from tests.support.gpu.gpu_world import address


def nobody_answers(library: ctypes.CDLL) -> None:
    """The wait ends at its budget; what follows in the pass sends nothing."""
    scene = Scene(library)
    (client,), world = scene.clients, scene.world
    scene.kill()
    began = world.now
    client.state["budget_ns"] = 30_000
    assert not scene.pass_of(client, scene.handle).any()
    assert client.state["status"] == LinkStatus.TIMEOUT and 30_000 <= world.now - began < 300_000
    word = int(client.places.request_signal[0])
    assert slot.signalled_seq(word, client.epoch) == 1
    began = world.now
    assert not scene.pass_of(client, scene.handle).any()
    assert client.state["status"] == LinkStatus.TIMEOUT and world.now - began < 20_000
    assert int(client.places.request_signal[0]) == word, "a broken link sends nothing"


def a_watchdog_ends_a_wait(library: ctypes.CDLL) -> None:
    scene = Scene(library)
    (client,) = scene.clients
    scene.kill()

    def watchdog() -> Waiting:
        for _ in range(100):
            yield
        client.abort[0] = 1

    client.fill(BODIES[0], scene.handles)
    scene.do(client.launched(BODIES[0]), watchdog())
    assert client.state["status"] == LinkStatus.ABORTED and scene.world.now < BUDGET_NS


def a_pass_that_fails_while_a_put_looks_is_sent_whole_or_not_at_all(library: ctypes.CDLL) -> None:
    """Whenever the wait of another link of the same GPU says that its step was refused; and the next step is served."""
    found = set()
    for turns in range(60):
        scene = Scene(library, clients=2)
        (client, other), world, body = scene.clients, scene.world, BODIES[0]
        other.device, failed = client.device, world.private.new("<u8", 1)
        client.state["failed"] = other.state["failed"] = address(failed)
        scene.do(client.step(body, scene.handles))
        other.fill(body, (scene.handle + 1,) * 2)
        scene.do(other.ended(other.launch_put(body)), other.answered_to(1))
        client.fill(body, scene.handles)
        client.record(2, client.memory(body, scene.handles, 2, BUDGET_NS // 1000))
        put = client.launch_put(body)
        world.run(turns)
        scene.do(client.ended(put), other.waited())
        assert (other.state["status"], failed[0]) == (LinkStatus.FAILED, 1)
        sent = int(client.state["pushed"]) == 2
        assert (slot.signalled_seq(int(client.places.request_signal[0]), client.epoch) == 2) == sent
        found.add(sent)
        failed[0], client.seq = 0, 1 + sent
        if sent:
            scene.do(client.waited())
            client.look(2, body, scene.handles, scene.shard.ready)
        scene.do(client.step(body, scene.handles))
    assert found == {False, True}


def steps_in_flight_are_answered_each(library: ctypes.CDLL) -> None:
    """Steps are put, some without rows, before the first answer is awaited; those after a refused one add nothing."""
    scene = Scene(library, network=library.has_heaps)
    (client,) = scene.clients
    flights = [client.another() for _ in range(DEPTH)]
    for turn in range(24):
        bodies = [scene.chooser.choice(BODIES) for _ in flights]
        refused = turn % (2 * DEPTH)
        ys = []
        for index, (one, body) in enumerate(zip(flights, bodies, strict=True)):
            handles = (scene.handle + (index == refused),) * 2
            ys.append(one.fill(body, handles))
            if scene.chooser.random() < 0.3 and index != refused:
                one.counts[:] = 0
            else:
                client.seq += 1
                client.record(client.seq, client.memory(body, handles, client.seq, BUDGET_NS // 1000))
            scene.do(one.ended(one.launch_put(body)))
            assert one.sent[0] == (client.seq if one.counts[0] else 0)
        for index, (one, body) in enumerate(zip(flights, bodies, strict=True)):
            scene.do(one.added(body))
            assert not one.sent[0] or client.is_answered(int(one.sent[0])), "a slot is free behind its add"
            one.compare(ys[index], body, scene.handles, bool(one.sent[0]) and index < refused)
        is_refused = refused < DEPTH
        assert client.state["status"] == (LinkStatus.FAILED if is_refused else LinkStatus.OK)
        assert not is_refused or client.state["status_seq"] == flights[refused].sent[0]
        client.state["status"] = LinkStatus.OK
    scene.replay()


def a_put_has_any_number_of_blocks(library: ctypes.CDLL) -> None:
    scene = Scene(library)
    (client,) = scene.clients
    for client.grid in (1, 2, 7):
        for body in (BODIES[2], BODIES[3]):
            scene.do(client.step(body, scene.handles))


def a_refused_step_voids_its_pass(library: ctypes.CDLL) -> None:
    scene = Scene(library)
    (client,) = scene.clients
    assert not scene.pass_of(client, scene.handle + 1).any()
    assert client.state["status"] == LinkStatus.FAILED
    assert not scene.pass_of(client, scene.handle).any()
    assert (client.state["status"], client.state["pushed"]) == (LinkStatus.FAILED, 1), "the pass goes on without"
    client.state["status"] = LinkStatus.OK
    assert scene.pass_of(client, scene.handle).any()
    assert (client.state["status"], client.state["pushed"]) == (LinkStatus.OK, 2)


def a_step_that_a_host_has_written_is_sent(library: ctypes.CDLL) -> None:
    """Through its own copy of the slot, which one kernel puts: what Link does beyond a network."""
    scene = Scene(library, network=True)
    (client,), world = scene.clients, scene.world

    def steps() -> Waiting:
        for turn in range(2 * DEPTH):
            body = BODIES[turn % len(BODIES)]
            client.seq += 1
            memory = client.memory(body, scene.handles, client.seq, BUDGET_NS // 1000)
            client.record(client.seq, memory)
            world.write(client.own_slot(client.seq)[: len(memory)], np.frombuffer(memory, np.uint8))
            yield from client.nothing()  # a kernel of the same queue: what was written before it is seen behind it
            yield from client.ended(client.launch("link_send", client.seq))
            client.sent[0] = client.state["pushed"] = client.seq
            yield from client.waited()
            assert client.state["status"] == LinkStatus.OK
            client.look(client.seq, body, scene.handles, {scene.handle})

    scene.do(steps())
    assert client.answered == 2 * DEPTH
