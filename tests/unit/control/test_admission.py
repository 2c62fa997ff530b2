"""Admission, against a slow and obvious model, between tenants, and in a controller without sockets."""

import random
import threading
from collections import Counter
from contextlib import nullcontext

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_server.control.admission.capacity import PoolCapacity
from lora_server.control.admission.holds import HoldUpdates
from lora_server.control.admission.queue import AdmissionQueue, QueuePosition
from lora_server.control.admission.tickets import TicketClass
from lora_server.errors import AdapterLoadError, AdmissionError, UnknownAdapterError
from lora_server.slo import SloClasses
from lora_server.timings import Timings
from lora_server.wire import lora_server_pb2 as pb
from tests.support.clocks import VirtualClock
from tests.support.controllers import ToldShard, drained, kept, make_controller, moved, registration
from tests.support.serving import HANG_SECONDS, until

SHARDS = range(2)


class Model:
    """All of it from scratch at every look: who holds what, who waits since when."""

    def __init__(self, capacity, sizes, most):
        self.capacity, self.sizes, self.most = capacity, sizes, most
        self.holds, self.queue, self.now = [], [], 0.0
        self.first_since = {}  # key -> when it was first seen to be the first that does not fit

    def active(self):
        return {handle for _, _, handle in self.holds}

    def fits(self, handles):
        taken = [sum(self.sizes[one][shard] for one in handles) for shard in SHARDS]
        return all(taken[shard] <= self.capacity[shard] for shard in SHARDS) and len(handles) <= (self.most or 99)

    def admit(self):
        """One pass over the queue, which changes what fits as it goes."""
        gives_way = None
        for entry in list(self.queue):
            _, key, handles = entry
            keeps_its_own = set(handles) <= self.active() - (gives_way or set())
            if gives_way and not keeps_its_own:
                continue
            if self.fits(self.active() | set(handles)):
                self.queue.remove(entry)
                self.holds += [(*key, handle) for handle in handles]
            elif gives_way is None:
                gives_way = self.gives_way(key, set(handles))

    def gives_way(self, key, handles):
        """Coldest first: until it would fit, and one more for each further while."""
        whiles = (self.now - self.first_since.setdefault(key, self.now)) // Timings.first_in_queue
        times = Counter(handle for _, _, handle in self.holds if handle not in handles)
        coldest, chosen = sorted(times, key=lambda one: (times[one], one)), set()
        if whiles:
            while not self.fits((self.active() - chosen) | handles):
                chosen.add(coldest[len(chosen)])
            chosen.update(coldest[: len(chosen) + int(whiles) - 1])
        return chosen


@pytest.mark.parametrize("seed", range(25))
def test_admission_equals_the_model(seed):
    """Capacity is never exceeded, the order is the rule's, no ticket starves or is lost, every place is returned."""
    dice = random.Random(seed)
    handles = range(1, 9)
    sizes = {handle: {shard: dice.randint(0, 5) for shard in SHARDS} for handle in handles}
    model = Model(dict.fromkeys(SHARDS, 10), sizes, dice.choice([0, 0, 3]))
    told, numbers = set(), iter(range(1, 10_000))

    def send(command):
        if command.uses.HasField("active"):
            more, fewer = command.uses.active.more, command.uses.active.fewer
            assert not told & set(more) and set(fewer) <= told
            told.difference_update(fewer)
            told.update(more)

    room = PoolCapacity(model.most)
    updates = HoldUpdates(send, nullcontext())
    admission = AdmissionQueue(lambda names: [*map(int, names)], room, updates=updates, clock=lambda: model.now)
    for shard in SHARDS:
        room.sizes.set_capacity(shard, 10)
        for handle in handles:
            room.sizes.set_size(handle, shard, sizes[handle][shard])

    def check():
        waits = [key for _, key, _ in model.queue]
        assert list(admission.tickets.waiting) == waits
        assert room.active == model.active() <= told and model.fits(told)
        if dice.random() < 0.3:
            updates.flush(now=True)
            assert told == room.active
        for position, (_, key, wanted) in enumerate(model.queue, start=1):
            answer = admission.acquire(*key, [str(one) for one in wanted])
            assert isinstance(answer, QueuePosition) and answer.position == position and answer.reason
        for client, number, _ in model.holds:
            assert isinstance(admission.acquire(client, number, ["1"]), list), "asked again, it is the same"

    for _ in range(250):
        model.now += dice.choice([0.0, 0.1, 0.3])
        action, client = dice.random(), dice.randint(1, 4)
        if action < 0.5:
            number, wanted = next(numbers), dice.sample(handles, dice.choice([1, 1, 2]))
            if model.fits(set(wanted)):
                model.queue.append((model.now, (client, number), wanted))
                admission.acquire(client, number, [str(one) for one in wanted])
            else:
                with pytest.raises(AdapterLoadError, match="together"):
                    admission.acquire(client, number, [str(one) for one in wanted])
        elif action < 0.8 and model.holds:
            client, number, _ = dice.choice(model.holds)
            given = [hold for hold in model.holds if hold[:2] == (client, number)]
            model.holds = [hold for hold in model.holds if hold not in given]
            admission.release(client, [hold[2] for hold in given])
            admission.settle(client, [number])
        elif action < 0.9 and model.queue + model.holds:
            client, number = dice.choice([key for _, key, _ in model.queue] + [hold[:2] for hold in model.holds])
            model.queue = [one for one in model.queue if one[1] != (client, number)]
            model.holds = [hold for hold in model.holds if hold[:2] != (client, number)]
            admission.cancel(client, [number, number])
        elif action > 0.97:
            model.queue = [one for one in model.queue if one[1][0] != client]
            model.holds = [hold for hold in model.holds if hold[0] != client]
            admission.forget_client(client)
        model.admit()
        check()
    for _, key, _ in list(model.queue):  # those who hold let go, others come for ever: the first is served all the same
        for _ in range(len(handles) + 2):
            if not admission.tickets.is_open(key):
                break
            model.now += Timings.first_in_queue
            for hold in list(model.holds):
                model.holds.remove(hold)
                admission.release(hold[0], [hold[2]])
                model.admit()
                number, wanted = next(numbers), [dice.choice(handles)]
                model.queue.append((model.now, (9, number), wanted))
                admission.acquire(9, number, [str(one) for one in wanted])
                model.admit()
        assert not admission.tickets.is_open(key)
    check()
    for client in (1, 2, 3, 4, 9):
        admission.forget_client(client)
    updates.flush(now=True)
    assert not room.active and not told and not admission.tickets and not admission.tickets.waiting
    assert not room._used.any()


def limited(**sizes):
    """An admission with a pool of 10 bytes on one shard, and a clock to turn."""
    clock = VirtualClock()
    admission = AdmissionQueue(lambda names: [sorted(sizes).index(name) + 1 for name in names], clock=clock.now)
    admission.capacity.sizes.set_capacity(0, 10)
    for handle, name in enumerate(sorted(sizes), start=1):
        if sizes[name] is not None:
            admission.capacity.sizes.set_size(handle, 0, sizes[name])
    return admission, clock


def test_smaller_tickets_overtake_the_head_only_until_it_has_waited():
    admission, clock = limited(a=6, big=8, small=2)
    assert admission.acquire(1, 1, ["a"]) == [1]
    no_room = "shard 0's pool of 10 B has 4 B beside the 1 adapters that are in use or pinned, 8 B are needed"
    assert admission.acquire(2, 1, ["big"]).reason == no_room
    assert admission.acquire(3, 1, ["small"]) == [3], "it fits beside, and the head waits for nothing of it yet"
    clock.advance(Timings.first_in_queue)
    assert admission.acquire(4, 1, ["a"]) == QueuePosition(2, "earlier requests go first")
    assert admission.acquire(4, 2, []) == [], "nothing is had at once"
    admission.release(1, [1])
    assert admission.tickets.is_open((2, 1)) is False, "6 + 2 bytes are free now"
    assert admission.counters.immediate == 2 and admission.counters.queued == 1
    assert admission.counters.waits.sum_ns == Timings.first_in_queue * 1e9


def test_a_ticket_with_an_objective_stops_backfill_after_a_part_of_it():
    admission, clock = limited(a=6, big=8, small=2)
    admission.acquire(1, 1, ["a"])
    admission.acquire(2, 1, ["big"], slo=TicketClass("gold", 1.0))
    assert admission.acquire(3, 1, ["a"]) == [1], "its adapter is in use"
    clock.advance(0.25)
    assert admission.acquire(4, 1, ["a"]) == QueuePosition(2, "earlier requests go first")
    assert admission.acquire(4, 2, ["small"]) == QueuePosition(3, "earlier requests go first")
    admission.release(1, [1])
    admission.release(3, [1])
    assert list(admission.tickets.waiting) == [(4, 1)]


def test_tickets_of_unmeasured_adapters_are_skipped():
    admission, clock = limited(a=6, new=None)
    assert admission.acquire(1, 1, ["new"]).reason == "shard 0 has not looked at its files yet"
    clock.advance(5.0)
    assert admission.acquire(2, 1, ["a"]) == [1]
    admission.capacity.sizes.set_size(2, 0, 4)
    admission.admit()
    assert admission.acquire(1, 1, ["new"]) == [2]


def test_a_call_without_a_ticket_is_admitted_at_once_or_refused():
    admission, _ = limited(a=6, b=6)
    assert admission.acquire(1, 0, ["a"]) == [1]
    with pytest.raises(AdmissionError, match=r"adapters \['b'\]: no place now: shard 0's pool"):
        admission.acquire(1, 0, ["b"])
    assert not admission.tickets.waiting and admission.acquire(1, 0, ["a"]) == [1]


def test_a_cancel_that_precedes_its_ticket_leaves_no_hold():
    admission, _ = limited(a=6)
    admission.cancel(1, [7])
    with pytest.raises(AdmissionError, match="request cancelled"):
        admission.acquire(1, 7, ["a"])
    assert not admission.capacity.active
    admission.settle(1, [7])
    assert not admission.tickets


@pytest.fixture
def serve(stack):
    """Start controllers of three adapters of 4 bytes each, with one shard whose pool has 10 bytes."""

    def start(memory=None, **fields):
        controller = make_controller(settled=memory is None, **fields)
        shard = ToldShard(controller, memory, pool_bytes=10)
        stack.callback(shard.close)
        if memory is None:
            loads = [kept(name, handle) for handle, name in enumerate("abc", start=1)]
            controller.adapters.recovery.adopt(loads, (), 0)
            controller.adapters.sync.settle()
        sizes = [pb.Residency(handle=handle, bytes=4, measured=True) for handle in (1, 2, 3)]
        moved(controller, shard.handle, sizes)
        return controller, shard

    return start


def test_a_shard_that_registers_gets_the_holds_of_every_client_that_holds_or_held_an_adapter(serve):
    controller, shard = serve()
    leases = [controller.clients.join(f"engine-{number}")[0] for number in range(4)]
    admission = controller.adapters.admission
    for lease in leases:
        assert not controller.requests.acquire(lease.proof, ["a"], ticket=1).queued
    controller.requests.release(leases[1].proof, [1])
    admission.holds.expect(leases[2].client)  # its other holds are unknown: those that the shard knows stay
    controller.clients.leave(leases[3].proof)
    shard.close()
    controller.shards.depart(shard.handle)
    own = registration(0, pid=7, pool_bytes=10, agreement_digest=controller.agreement.digest())
    commands = drained(controller.arrivals.arrive(own, []))
    holds = {one.client: ([*one.more], one.anew) for command in commands for one in command.uses.holds}
    assert holds == {leases[0].client: ([1], True), leases[1].client: ([], True), leases[2].client: ([1], False)}


def test_the_trace_of_a_request_that_changed_nothing_is_of_no_later_one():
    sent = []
    updates = HoldUpdates(sent.append, nullcontext())
    updates.active([7], [], {"traceparent": "first"})
    updates.flush()
    updates.active([], [7], {})
    updates.active([7], [], {"traceparent": "again"})
    updates.flush()
    updates.active([8], [], {})
    updates.flush()
    assert [(dict(one.uses.active.trace), [*one.uses.active.more]) for one in sent] == [
        ({"traceparent": "first"}, [7]),
        ({}, [8]),
    ]


def join(controller):
    lease, _ = controller.clients.join("test")
    return lease.proof


def test_a_waiting_client_is_told_when_it_is_admitted(serve):
    controller, shard = serve()
    clients, requests, told = controller.clients, controller.requests, []
    one, other = join(controller), join(controller)
    assert requests.acquire(one, ["a", "b"], 1)[1] is None
    records, queued, _ = requests.acquire(other, ["c"], 1)
    assert [record.handle for record in records] == [3] and queued.position == 1
    assert requests.wait_admitted(other, [1], 0.01) == []
    client = clients.renew(other)
    wait = controller.adapters.admission.wait_admitted
    waiter = threading.Thread(target=lambda: told.extend(wait(client, [1], 10 * HANG_SECONDS)))
    waiter.start()
    requests.release(one, [1])
    waiter.join(HANG_SECONDS)
    assert told == [1] and requests.acquire(other, ["c"], 1)[1] is None, "it holds it now"
    until(lambda: shard.memory.active == {2, 3}, "the shard knows which adapters are active")
    assert [one.holders for one in controller.adapters.listings.all()] == [0, 1, 1]
    clients.leave(other)
    controller.adapters.admission.tell_ended()
    until(lambda: shard.memory.active == {2}, "a client that left holds nothing")


def test_clients_beyond_the_waiting_threads_are_answered_at_once(serve):
    controller, _ = serve(max_waiters=0)
    one = join(controller)
    controller.requests.acquire(one, ["a", "b"], 1)
    assert controller.requests.acquire(one, ["c"], 2)[1] is not None
    assert controller.requests.wait_admitted(one, [2], 100.0) == []


def test_a_restarted_shard_and_a_new_controller_learn_which_adapters_are_active(serve):
    controller, shard = serve()
    requests = controller.requests
    one, other = join(controller), join(controller)
    assert requests.acquire(one, ["a", "b"], 1)[1] is None and requests.acquire(other, ["c"], 1)[1] is not None
    shard.close()
    controller.arrivals.depart(shard.handle)
    fresh = ToldShard(controller, pool_bytes=10)
    until(lambda: fresh.memory.active == {1, 2}, "a shard that was restarted")
    fresh.close()
    successor, shard = serve(shard.memory)
    assert successor.start.settled.is_set()
    active = successor.adapters.admission.queue.capacity.active
    assert active == {1, 2}, "as the shard was told, until the clients have spoken"
    assert successor.requests.acquire(other, ["c"], 1)[1] is not None, "the ticket is a new one, and queued again"
    successor.requests.restore(one, [2])
    assert successor.requests.acquire(other, ["c"], 1)[1] is not None, "the other has not said what it holds"
    successor.requests.restore(other, [])
    assert successor.requests.acquire(other, ["c"], 1)[1] is None
    until(lambda: shard.memory.active == {2, 3}, "a hold that was not restored is dropped")


def test_tickets_that_can_never_be_admitted_are_refused(serve):
    controller, _ = serve()
    one = join(controller)
    controller.requests.acquire(one, ["a", "b"], 1)
    assert controller.requests.acquire(one, ["c"], 2)[1] is not None
    controller.adapters.rollout.remove("c")
    with pytest.raises(UnknownAdapterError, match="adapter 'c': not registered here"):
        controller.requests.acquire(one, ["c"], 2)
    limited_to_one, _ = serve(most_active=1)
    with pytest.raises(AdapterLoadError, match="more than --max-active-adapters 1"):
        limited_to_one.adapters.admission.acquire(1, ["a", "b"])


def test_pinned_adapters_have_a_place_though_no_client_holds_them(serve):
    controller, shard = serve(most_active=2)
    one = join(controller)
    controller.adapters.changes.amend(controller.adapters.listings.get("a").record, pinned=True)
    until(lambda: shard.memory.active == {1}, "it stays")
    assert controller.requests.acquire(one, ["b"], 1)[1] is None, "it is not counted as one in use"
    assert "4 are needed" in controller.requests.acquire(one, ["c"], 2)[1].reason.replace(" B", "")
    with pytest.raises(AdapterLoadError, match=r"8 bytes are needed together .* of which 4 are pinned"):
        controller.requests.acquire(one, ["b", "c"], 3)
    controller.adapters.rollout.unpin("a")
    assert controller.requests.acquire(one, ["c"], 2)[1] is None


def test_waiting_requests_go_by_the_classes_of_their_adapters(serve):
    gold = {"gold": {"slo": "ttft_p99=1s,tpot_avg=1s", "adapters": ["c*"]}}
    controller, _ = serve(most_active=1, classes=SloClasses.parse(gold))
    one = join(controller)
    controller.requests.acquire(one, ["a"], 1)
    assert controller.requests.acquire(one, ["b"], 2)[1].position == 1
    assert controller.requests.acquire(one, ["c"], 3)[1].position == 1
    assert controller.requests.acquire(one, ["b"], 2)[1].position == 2
    controller.requests.release(one, [1])
    assert controller.requests.acquire(one, ["c"], 3)[1] is None
    queue = controller.adapters.admission.queue
    assert sum(queue.counters.waits_by_class["gold"].counts) == 1 and queue.counters.queued == 1


WEIGHTS = st.dictionaries(st.sampled_from("abcd"), st.sampled_from([0.5, 1.0, 2.0, 3.0]), min_size=2)


class OnePlace:
    """A server where one adapter is active at a time; each ticket is a client and an adapter of its own."""

    def __init__(self, weights):
        self.room = PoolCapacity(1)
        self.room.sizes.set_capacity(0, 10)
        self.admission = AdmissionQueue(lambda names: [int(name) for name in names], self.room, clock=lambda: 0.0)
        self.weights, self.owner, self.holder, self.served = weights, {}, None, []

    def ask(self, tenant):
        client = len(self.owner) + 1
        self.owner[client] = tenant
        self.room.sizes.set_size(client, 0, 1)
        answer = self.admission.acquire(client, 1, [str(client)], tenant, self.weights[tenant])
        if not isinstance(answer, QueuePosition):
            self.holder = client
        return client

    def next(self):
        """Hand the place on; return the client that has it now."""
        before = self.holder
        self.admission.release(before, [before])
        (self.holder,) = (one for one in self.owner if self.admission.holds.of(one))
        self.served.append(self.owner[self.holder])
        return self.holder


@settings(max_examples=40)
@given(WEIGHTS, st.integers())
def test_tenants_that_all_wait_share_by_weight(weights, seed):
    play, most = OnePlace({**weights, "first": 1.0}), 20
    play.ask("first")
    tickets = sorted(weights) * most
    random.Random(seed).shuffle(tickets)
    for tenant in tickets:
        play.ask(tenant)
    for _ in range(most):
        play.next()
        had = {tenant: play.served.count(tenant) / weight for tenant, weight in weights.items()}
        for one in weights:
            for other in weights:
                assert had[one] - had[other] <= 1 / weights[one] + 1e-9


@settings(max_examples=40)
@given(st.integers(1, 60), st.integers(0, 30))
def test_a_new_ticket_waits_for_at_most_one_of_each_other_tenant(length, served):
    play = OnePlace({"crowd": 1.0, "new": 1.0})
    for _ in range(length + 1):
        play.ask("crowd")
    for _ in range(min(served, length - 1)):
        play.next()
    mine = play.ask("new")
    assert play.admission.acquire(mine, 1, [str(mine)]).position <= 2
    assert mine in (play.next(), play.next())


def test_cancelled_tickets_do_not_count_against_their_tenant():
    play = OnePlace({"hasty": 1.0, "calm": 1.0})
    play.ask("calm")
    for client in [play.ask("hasty") for _ in range(50)]:
        play.admission.cancel(client, [1])
    play.ask("calm")
    late = play.ask("hasty")
    assert late in (play.next(), play.next())
