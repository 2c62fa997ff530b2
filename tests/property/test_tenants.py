"""Fair queueing between tenants: by weight, however many clients each has, and equally between its clients."""

import itertools
from collections import Counter
from fractions import Fraction
from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from lora_server.shard.schedule import MOST_BEGUN, PendingStep, TenantShare, cost
from lora_server.wire.slot import RequestHeader
from tests.support.rig import Client, loaded_rig

EMPTY = RequestHeader._make([0] * len(RequestHeader._fields))
MOST = cost(EMPTY._replace(num_rows=256))


class Queue:
    """The rule, each client's oldest step, and what each client was served so far."""

    def __init__(self, weights):
        self.rule, self.weights, self.clients, self.waiting = TenantShare(), weights, {}, {}
        self.seqs, self.had = itertools.count(1), Counter()

    def push(self, tenant, client, rows):
        seq, number = next(self.seqs), 100 * tenant + client
        new = SimpleNamespace(client=number, epoch=1, finish=0, tenant=str(tenant), weight=self.weights[tenant])
        peer = self.clients.setdefault((tenant, client), new)
        header = EMPTY._replace(num_rows=rows)
        self.waiting[number] = PendingStep(peer, seq, header, seq, 0, pin=1)

    def pick(self):
        """Whose step is served now: (tenant, client)."""
        step = self.rule.pick(self.waiting)
        del self.waiting[step.connection.client]
        one = divmod(step.connection.client, 100)
        self.had[one] += cost(step.header)
        return one

    def of(self, tenant):
        return sum(had for (its, _), had in self.had.items() if its == tenant)

    def ready(self):
        return {client // 100 for client in self.waiting}


ROWS = st.integers(0, 256)
WEIGHTS = st.lists(st.sampled_from([1.0, 0.5, 2.0, 3.0, 8.0]), min_size=2, max_size=4)
CLIENTS = st.lists(st.lists(ROWS, min_size=1, max_size=5), min_size=4, max_size=4)


@given(weights=WEIGHTS, clients=CLIENTS, turns=st.integers(50, 150))
def test_tenants_that_always_wait_get_an_ideal_shards_shares(weights, clients, turns):
    """One that serves all tenants at once, by weight, and all clients of a tenant at once (GPS), in exact fractions."""
    queue = Queue(weights)
    rows = {(t, c): rows for t in range(len(weights)) for c, rows in enumerate(clients[t])}
    for (tenant, client), its in rows.items():
        queue.push(tenant, client, its)
    for _ in range(turns):
        one = queue.pick()
        queue.push(*one, rows[one])
    everything = sum(queue.had.values())
    for tenant, weight in enumerate(weights):
        ideal = everything * Fraction(weight) / sum(map(Fraction, weights))
        apart = 2 * MOST * max(1 / Fraction(one) for one in weights)
        assert abs(queue.of(tenant) - ideal) <= apart * Fraction(weight), (tenant, queue.of(tenant), float(ideal))
        each = [queue.had[tenant, client] for client in range(len(clients[tenant]))]
        assert max(each) - min(each) <= 2 * MOST, "clients of one tenant are equal"


EVENTS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), ROWS, st.booleans()), max_size=80)


@given(weights=st.lists(st.sampled_from([1.0, 0.5, 4.0]), min_size=4, max_size=4), events=EVENTS)
def test_of_two_waiting_tenants_neither_gets_ahead(weights, events):
    """In every stretch in which both had a step there, looked at one by one: who comes and goes gains nothing."""
    queue, apart = Queue(weights), 2 * MOST * max(1 / Fraction(one) for one in weights)
    history = []  # of each pick: who waited, and what each tenant had had before
    for tenant, client, rows, goes_on in events:
        if 100 * tenant + client not in queue.waiting:
            queue.push(tenant, client, rows)
        if goes_on:
            history.append((queue.ready(), [Fraction(queue.of(t)) / Fraction(weights[t]) for t in range(4)]))
            queue.pick()
    for one, other in itertools.combinations(range(4), 2):
        since = None
        for ready, had in history:
            if not {one, other} <= ready:
                since = None
                continue
            since = since or []
            since.append(had[one] - had[other])
            assert max(since) - min(since) <= apart, (one, other)


def test_a_small_step_overtakes_another_tenants_begun_step():
    """And no more than a few are begun, of all tenants together."""
    queue = Queue([1.0] * 8)
    for tenant, rows in enumerate(range(256, 256 - 32 * MOST_BEGUN, -32)):
        queue.push(tenant, 0, rows)
        step = queue.rule.pick(queue.waiting)
        assert step.connection.tenant == str(tenant)
        step.work = iter(())
    queue.push(7, 0, 1)
    last = queue.rule.pick(queue.waiting)
    assert last.connection.tenant == str(MOST_BEGUN - 1), "it has to be done before another is begun"
    del queue.waiting[last.connection.client]
    assert queue.rule.pick(queue.waiting).connection.tenant == "7"


def test_a_shard_knows_the_tenants_of_its_clients(tiny_adapters):
    with loaded_rig(tiny_adapters["all"]) as rig:
        client = Client(rig.shard, 1, tenant="law", weight=2.0)
        (connection,) = rig.shard.port.connections
        assert (connection.tenant, connection.weight) == ("law", 2.0)
        client.send(client.request())
        client.link.close()
