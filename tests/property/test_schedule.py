"""Fair queueing between clients, and by weight between tenants: what each has had decides; none starves or saves up."""

import itertools
import time
from collections import Counter
from fractions import Fraction
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_server.histogram import BOUNDS_NS
from lora_server.shard.loop import PHASES, Phases
from lora_server.shard.schedule import (
    AHEAD_ROWS,
    MOST_BEGUN,
    MOST_ROWS,
    NOT_READY,
    STEP_ROWS,
    FairShare,
    PendingStep,
    StepWork,
    TenantShare,
    cost,
)
from lora_server.transport.base import Grant
from lora_server.wire import slot
from lora_server.wire.slot import RequestHeader
from tests.support.rig import Client, loaded_rig

EMPTY = RequestHeader._make([0] * len(RequestHeader._fields))


class Queue:
    """A rule, and each client's oldest step."""

    def __init__(self):
        self.rule, self.clients, self.waiting, self.clock = FairShare(), {}, {}, 0

    def push(self, client, rows, blocked=False, step_class=slot.DECODE):
        self.clock += 1
        header = EMPTY._replace(num_rows=rows, num_entries=rows, step_class=step_class)
        peer = self.clients.setdefault(client, SimpleNamespace(grant=Grant(client, 1, b""), finish=0))
        self.waiting[client] = PendingStep(peer, self.clock, header, self.clock, 0, pin=None if blocked else 1)

    def pick(self):
        """Which client is served now, or None."""
        step = self.rule.pick(self.waiting.values())
        return None if step is None else self.waiting.pop(step.connection.grant.client).connection.grant.client


ROWS = st.sampled_from([0, 1, 8, 100, 256, 4096, MOST_ROWS, 2**32 - 1])
EVENTS = st.lists(st.tuples(st.integers(0, 5), ROWS, st.booleans(), st.booleans()), max_size=80)


@given(events=EVENTS)
def test_a_step_waits_for_each_other_client_no_longer_than_its_own_share(events):
    """Some client pushes, if it has nothing there, or what it has becomes ready; then one may be picked."""
    queue, bound, passed = Queue(), {}, {}
    for client, rows, blocked, goes_on in events:
        if client in queue.waiting:
            queue.waiting[client].pin = 1
        else:
            queue.push(client, rows, blocked)
        if not goes_on:
            continue
        now = queue.rule._now
        ready = {one: step for one, step in queue.waiting.items() if not step.blocked}
        picked = queue.pick()
        assert (picked is None) == (not ready)
        for step in ready.values():
            bound.setdefault(step.seq, step.share.finish - now)
            assert queue.rule._now >= now and step.share.start >= now, "time goes on"
        if picked is None:
            continue
        served = ready.pop(picked)
        assert all((served.share.finish, served.seq) < (step.share.finish, step.seq) for step in ready.values())
        for step in ready.values():
            had = passed.setdefault(step.seq, Counter())
            had[picked] += cost(served.header)
            assert had[picked] <= bound[step.seq], "it is starved"


CLASS_EVENTS = st.lists(
    st.tuples(st.integers(0, 5), st.sampled_from([0, 1, 64, 256, 900, 4096]), st.integers(0, 200), st.booleans()),
    max_size=80,
)


@given(events=CLASS_EVENTS)
def test_steps_with_a_deadline_go_first_within_a_bound(events):
    """The pick equals the literal rule, and a client with a class is never ahead of the others by more."""
    queue, passed = Queue(), {}
    for client, rows, start_by, goes_on in events:
        if client not in queue.waiting:
            queue.push(client, rows)
            queue.waiting[client].share = NOT_READY._replace(start_by_ns=start_by if client % 2 else 0)
        if not goes_on:
            continue
        ready = dict(queue.waiting)
        served = ready.pop(queue.pick())
        now = min(step.share.start for step in (served, *ready.values()))

        def literal(step, now=now):
            in_time = step.share.start_by_ns and step.share.finish <= now + AHEAD_ROWS
            return (0, step.share.start_by_ns) if in_time else (1, (step.share.finish, step.seq))

        assert all(literal(served) <= literal(step) for step in ready.values())
        for step in ready.values():
            had = passed.setdefault(step.seq, Counter())
            had[served.connection.grant.client] += cost(served.header)
            most = step.share.finish - now + AHEAD_ROWS
            assert had[served.connection.grant.client] <= passed.setdefault(("bound", step.seq), most), "it is starved"


def test_clients_of_a_class_have_no_larger_share():
    """They always wait, as others do; each of their steps goes first as long as they are not far ahead."""
    queue, had = Queue(), Counter()

    def push(client):
        queue.push(client, 56)
        queue.waiting[client].share = NOT_READY._replace(start_by_ns=1 if client == "gold" else 0)

    for client in ("gold", "silver", "brass"):
        push(client)
    order = []
    for _ in range(300):
        client = queue.pick()
        order.append(client)
        had[client] += 64
        push(client)
    assert order[: AHEAD_ROWS // 64] == ["gold"] * (AHEAD_ROWS // 64)
    assert max(had.values()) - min(had.values()) <= AHEAD_ROWS + 2 * 64


@pytest.mark.parametrize("step_class", [slot.DECODE, slot.PREFILL])
def test_decode_steps_of_a_client_with_a_class_have_a_deadline(tiny_adapters, step_class):
    with loaded_rig(tiny_adapters["all"]) as rig:
        client = Client(rig.shard, 1, step_us=500)
        before = time.monotonic_ns()
        seq = client.push(client.request(step_class=step_class))
        rig.shard.receiver.receive()
        (step,) = rig.shard.receiver.pending.values()
        if step_class == slot.PREFILL:
            assert step.share.start_by_ns == 0, "decode goes before prefill"
        else:
            assert before + 500_000 <= step.share.start_by_ns <= time.monotonic_ns() + 500_000
        client.answer(seq)
        assert rig.shard.receiver.row_ns > 0, "what its cost took is known for the next step"
        client.link.close()


@given(rows=st.lists(st.integers(0, 4096), min_size=2, max_size=8), turns=st.integers(1, 200))
def test_clients_that_always_wait_have_had_as_much_as_each_other(rows, turns):
    queue, had = Queue(), Counter()
    for client, count in enumerate(rows):
        queue.push(client, count)
    for _ in range(turns):
        client = queue.pick()
        had[client] += STEP_ROWS + rows[client]
        queue.push(client, rows[client])
    amounts = [had[client] for client in range(len(rows))]
    assert max(amounts) - min(amounts) <= 2 * (STEP_ROWS + max(rows))


def test_a_client_that_was_away_has_saved_nothing_and_a_new_one_owes_nothing():
    queue = Queue()
    queue.push("away", 8)
    queue.pick()
    for _ in range(100):
        queue.push("busy", 256)
        queue.pick()
    queue.push("busy", 256), queue.push("away", 256), queue.push("new", 256)
    order = [queue.pick() for _ in range(3)]
    assert order in (["away", "new", "busy"], ["busy", "away", "new"])
    for _ in range(10):
        queue.push("busy", 8), queue.push("away", 8)
        assert {queue.pick(), queue.pick()} == {"busy", "away"}, "from now on they take turns"


def test_what_a_step_claims_costs_at_most_so_much():
    assert cost(EMPTY) == STEP_ROWS
    assert cost(EMPTY._replace(num_out_rows=2**32 - 1)) == STEP_ROWS + MOST_ROWS
    assert cost(EMPTY._replace(num_rows=3, num_entries=7)) == STEP_ROWS + 7


MOST = cost(EMPTY._replace(num_rows=256))


class TenantQueue:
    """The rule, each client's oldest step, and what each client was served so far."""

    def __init__(self, weights):
        self.rule, self.weights, self.clients, self.waiting = TenantShare(), weights, {}, {}
        self.seqs, self.had = itertools.count(1), Counter()

    def push(self, tenant, client, rows):
        seq, number = next(self.seqs), 100 * tenant + client
        grant = Grant(number, 1, b"", str(tenant), self.weights[tenant])
        new = SimpleNamespace(finish=0, grant=grant)
        peer = self.clients.setdefault((tenant, client), new)
        header = EMPTY._replace(num_rows=rows)
        self.waiting[number] = PendingStep(peer, seq, header, seq, 0, pin=1)

    def pick(self):
        """Whose step is served now: (tenant, client)."""
        step = self.rule.pick(self.waiting)
        one = divmod(self.waiting.pop(step.connection.grant.client).connection.grant.client, 100)
        self.had[one] += cost(step.header)
        return one

    def of(self, tenant):
        return sum(had for (its, _), had in self.had.items() if its == tenant)

    def ready(self):
        return {client // 100 for client in self.waiting}


FEW_ROWS = st.integers(0, 256)
WEIGHTS = st.lists(st.sampled_from([1.0, 0.5, 2.0, 3.0, 8.0]), min_size=2, max_size=4)
CLIENTS = st.lists(st.lists(FEW_ROWS, min_size=1, max_size=5), min_size=4, max_size=4)


@given(weights=WEIGHTS, clients=CLIENTS, turns=st.integers(50, 150))
def test_tenants_that_always_wait_get_an_ideal_shards_shares(weights, clients, turns):
    """One that serves all tenants at once, by weight, and all clients of a tenant at once (GPS), in exact fractions."""
    queue = TenantQueue(weights)
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


TENANT_EVENTS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), FEW_ROWS, st.booleans()), max_size=80)


@given(weights=st.lists(st.sampled_from([1.0, 0.5, 4.0]), min_size=4, max_size=4), events=TENANT_EVENTS)
def test_of_two_waiting_tenants_neither_gets_ahead(weights, events):
    """In every stretch in which both had a step there, looked at one by one: who comes and goes gains nothing."""
    queue, apart = TenantQueue(weights), 2 * MOST * max(1 / Fraction(one) for one in weights)
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
    queue = TenantQueue([1.0] * 8)
    for tenant, rows in enumerate(range(256, 256 - 32 * MOST_BEGUN, -32)):
        queue.push(tenant, 0, rows)
        step = queue.rule.pick(queue.waiting)
        assert step.connection.grant.tenant == str(tenant)
        step.work = StepWork(iter(()))
    queue.push(7, 0, 1)
    last = queue.rule.pick(queue.waiting)
    assert last.connection.grant.tenant == str(MOST_BEGUN - 1), "it has to be done before another is begun"
    del queue.waiting[last.connection.grant.client]
    assert queue.rule.pick(queue.waiting).connection.grant.tenant == "7"


def test_a_shard_knows_the_tenants_of_its_clients(tiny_adapters):
    with loaded_rig(tiny_adapters["all"]) as rig:
        client = Client(rig.shard, 1, tenant="law", weight=2.0)
        (connection,) = rig.shard.port.connections
        assert (connection.grant.tenant, connection.grant.weight) == ("law", 2.0)
        client.send(client.request())
        client.link.close()


EDGES = st.sampled_from([0, *(bound + change for bound in BOUNDS_NS for change in (-1, 0, 1))])
STEP = st.tuples(*[EDGES | st.integers(0, 1 << 45)] * len(PHASES))


@given(st.lists(STEP, max_size=50))
def test_every_duration_is_counted_once_where_it_belongs(steps):
    phases = Phases()
    for step in steps:
        phases.add(*step)
    for (name, histogram), durations in zip(phases, list(zip(*steps, strict=True)) or [()] * len(PHASES), strict=True):
        bounds = zip([-1, *BOUNDS_NS], [*BOUNDS_NS, 1 << 62], strict=True)
        expected = [sum(max(low, 0) <= one < high for one in durations) for low, high in bounds]
        assert (name in PHASES, histogram.counts, histogram.sum_ns) == (True, expected, sum(durations))
