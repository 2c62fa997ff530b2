"""Admission between tenants: by weight while all of them wait, and no tenant waits behind another's long queue."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from lora_server.control.admission.admission import Admission, Queued
from lora_server.control.admission.room import Room

WEIGHTS = st.dictionaries(st.sampled_from("abcd"), st.sampled_from([0.5, 1.0, 2.0, 3.0]), min_size=2)


class OnePlace:
    """A server where one adapter is active at a time; each ticket is a client and an adapter of its own."""

    def __init__(self, weights):
        self.room = Room(1)
        self.room.set_capacity(0, 10)
        self.admission = Admission(lambda names: [int(name) for name in names], self.room, clock=lambda: 0.0)
        self.weights, self.owner, self.holder, self.served = weights, {}, None, []

    def ask(self, tenant):
        client = len(self.owner) + 1
        self.owner[client] = tenant
        self.room.set_size(client, 0, 1)
        answer = self.admission.acquire(client, 1, [str(client)], tenant, self.weights[tenant])
        if not isinstance(answer, Queued):
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
