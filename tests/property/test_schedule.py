"""Fair queueing: what a client has had decides, not what it calls its steps; none starves, none saves up."""

from collections import Counter
from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from lora_server.shard.schedule import MOST_ROWS, STEP_ROWS, FairShare, PendingStep, cost
from lora_server.wire import slot
from lora_server.wire.slot import RequestHeader

EMPTY = RequestHeader._make([0] * len(RequestHeader._fields))


class Queue:
    """A rule, and each client's oldest step."""

    def __init__(self):
        self.rule, self.clients, self.waiting, self.clock = FairShare(), {}, {}, 0

    def push(self, client, rows, blocked=False, step_class=slot.DECODE):
        self.clock += 1
        header = EMPTY._replace(num_rows=rows, num_entries=rows, step_class=step_class)
        peer = self.clients.setdefault(client, SimpleNamespace(client=client, finish=0))
        self.waiting[client] = PendingStep(peer, self.clock, header, self.clock, 0, pin=None if blocked else 1)

    def pick(self):
        """Which client is served now, or None."""
        step = self.rule.pick(self.waiting.values())
        return None if step is None else self.waiting.pop(step.connection.client).connection.client


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
            bound.setdefault(step.seq, step.finish - now)
            assert queue.rule._now >= now and step.start >= now, "time goes on"
        if picked is None:
            continue
        served = ready.pop(picked)
        assert all((served.finish, served.seq) < (step.finish, step.seq) for step in ready.values())
        for step in ready.values():
            had = passed.setdefault(step.seq, Counter())
            had[picked] += cost(served.header)
            assert had[picked] <= bound[step.seq], "it is starved"


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
