"""Places between tenants: by weight while all of them wait, and nobody behind another's long queue."""

from hypothesis import given
from hypothesis import strategies as st

from lora_server.control.admission.admission import Admission, Queued
from lora_server.control.admission.room import Room

WEIGHTS = st.dictionaries(st.sampled_from("abcd"), st.sampled_from([0.5, 1.0, 2.0, 3.0]), min_size=2)


def one_place():
    """A server where one adapter is in use at a time, and all are measured."""
    room = Room(1)
    room.set_capacity(0, 10)
    for handle in range(1, 400):
        room.set_size(handle, 0, 1)
    return Admission(lambda names: [int(name) for name in names], room, clock=lambda: 0.0)


class Play:
    """Each ticket is a client and an adapter of its own, so that each waits for a place."""

    def __init__(self, weights):
        self.admission, self.weights, self.owner = one_place(), weights, {}
        self.holder, self.served = None, []

    def ask(self, tenant):
        client = len(self.owner) + 1
        self.owner[client] = tenant
        answer = self.admission.acquire(client, 1, [str(client)], tenant, self.weights[tenant])
        if not isinstance(answer, Queued):
            self.holder = client
        return client

    def next(self):
        """The place changes hands; who has it now."""
        before = self.holder
        self.admission.release(before, [before])
        (self.holder,) = (one for one in self.owner if self.admission.holds.of(one))
        self.served.append(self.owner[self.holder])
        return self.holder


@given(WEIGHTS, st.data())
def test_while_all_wait_each_gets_its_share(weights, data):
    play, most = Play({**weights, "first": 1.0}), 40
    play.ask("first")
    for tenant in data.draw(st.permutations(sorted(weights) * most)):
        play.ask(tenant)
    for _ in range(most // 2):
        play.next()
        had = {tenant: play.served.count(tenant) / weight for tenant, weight in weights.items()}
        for one in weights:
            for other in weights:
                assert had[one] - had[other] <= 1 / weights[one] + 1e-9


@given(st.integers(1, 60), st.integers(0, 30))
def test_a_long_queue_of_anothers_is_passed(length, served):
    """Whoever comes waits for one of each other tenant, at most, however many they have asked for."""
    play = Play({"crowd": 1.0, "new": 1.0})
    for _ in range(length + 1):
        play.ask("crowd")
    for _ in range(min(served, length - 1)):
        play.next()
    mine = play.ask("new")
    assert play.admission.acquire(mine, 1, [str(mine)]).position <= 2
    assert mine in (play.next(), play.next())


def test_what_was_cancelled_was_not_had():
    play = Play({"hasty": 1.0, "calm": 1.0})
    play.ask("calm")
    for client in [play.ask("hasty") for _ in range(50)]:
        play.admission.cancel(client, [1])
    play.ask("calm")
    late = play.ask("hasty")
    assert late in (play.next(), play.next())


def test_within_a_tenant_who_came_first_is_first():
    play = Play({"a": 1.0})
    asked = [play.ask("a") for _ in range(9)]
    assert [play.next() for _ in asked[1:]] == asked[1:]
