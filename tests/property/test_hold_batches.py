"""Clients/Hold against the same calls made one by one: the same answers, holds, queue, shares, counters and shards."""

import copy

from hypothesis import given
from hypothesis import strategies as st

from lora_server.access.gate import Gate
from lora_server.access.identity import ANYBODY
from lora_server.control.members.shards import ShardHandle
from lora_server.control.rpc.calls import Refusals
from lora_server.control.rpc.scope import Scopes
from lora_server.control.rpc.service import ClientsService
from lora_server.errors import LoraServerError
from lora_server.wire import lora_server_pb2 as pb
from tests.support.clocks import VirtualClock
from tests.support.controllers import kept, make_controller, moved, registration
from tests.support.signed import signed

NAMES = ("a", "b", "c", "d")
HANDLES = range(1, len(NAMES) + 1)
CLIENTS = range(2)


def acquire(names, ticket):
    return pb.HoldEntry(acquire=pb.AcquireRequest(names=names, ticket=ticket))


def release(handles):
    return pb.HoldEntry(release=pb.ReleaseRequest(handles=handles))


def cancel(tickets):
    return pb.HoldEntry(cancel=pb.CancelRequest(tickets=tickets))


SOME_NAMES = st.lists(st.sampled_from([*NAMES, "unknown"]), max_size=2, unique=True)
ACQUIRES = st.builds(acquire, SOME_NAMES, st.integers(0, 4))
RELEASES = st.builds(release, st.lists(st.integers(1, len(NAMES) + 1), min_size=1, max_size=3))
CANCELS = st.builds(cancel, st.lists(st.integers(1, 5), min_size=1, max_size=2))
BATCHES = st.lists(
    st.tuples(st.sampled_from(CLIENTS), st.lists(ACQUIRES | RELEASES | CANCELS, max_size=8), st.floats(0.0, 5.0)),
    max_size=8,
)


class Server:
    """A controller with two clients and one shard, whose pool takes two adapters of the four."""

    def __init__(self):
        self.clock = VirtualClock()
        self.controller = make_controller(clock=self.clock)
        self.service = ClientsService(self.controller, Scopes(self.controller, Gate()), Refusals())
        self.shard: ShardHandle = self.controller.arrivals.arrive(
            registration(0, agreement_digest=self.controller.agreement.digest(), pool_bytes=10), ()
        )
        self.controller.adapters.recovery.adopt(
            [kept(name, handle) for handle, name in zip(HANDLES, NAMES, strict=True)], (), 0
        )
        moved(self.controller, self.shard, [pb.Residency(handle=one, bytes=4, measured=True) for one in HANDLES])
        self.proofs = [self.controller.clients.leases.grant(f"engine {one}").proof for one in CLIENTS]

    def single(self, client, entry):
        """Make an entry's call as one of its own."""
        kind = entry.WhichOneof("entry")
        request = signed(getattr(entry, kind), self.proofs[client])
        try:
            reply = getattr(self.service, kind.capitalize())(request, ANYBODY)
        except LoraServerError as error:
            return pb.HoldAnswer(code=error.code, message=str(error))
        return pb.HoldAnswer(acquired=reply) if kind == "acquire" else pb.HoldAnswer()

    def batch(self, client, entries):
        return [*self.service.Hold(signed(pb.HoldRequest(entries=entries), self.proofs[client]), ANYBODY).answers]

    def state(self):
        """All that later answers depend on."""
        admission = self.controller.adapters.admission
        queue, counters = admission.queue, admission.queue.counters
        tickets = {
            key: (ticket.names, ticket.handles, str(ticket.error), ticket.since, ticket.waited)
            for client in CLIENTS
            for number in range(1, 6)
            if (ticket := queue.tickets.find(key := (self.proofs[client].client, number))) is not None
        }
        holds = {handle: admission.holds.by_client(handle) for handle in HANDLES}
        counts = counters.immediate, counters.queued, counters.hits, counters.misses, vars(counters.waits)
        return list(queue.tickets.waiting), tickets, holds, counts, admission.tally.sums(), queue.capacity.active

    def told(self):
        """What the shard knows at the end."""
        self.controller.adapters.admission.tell_ended()
        self.shard.commands.close()
        active, held = set(), {}
        for command in self.shard.commands:
            active = (active - {*command.uses.active.fewer}) | {*command.uses.active.more}
            for one in command.uses.holds:
                held[one.client] = (held.get(one.client, set()) - {*one.fewer}) | {*one.more}
        return active, {client: handles for client, handles in held.items() if handles}


@given(BATCHES)
def test_a_batch_is_the_same_calls_one_by_one(batches):
    """Also where it releases and cancels the same hold, asks twice with one ticket, or cancels one that is to come."""
    one_by_one, together = Server(), Server()
    for client, entries, seconds in batches:
        answers = [one_by_one.single(client, entry) for entry in entries]
        assert together.batch(client, entries) == answers
        assert together.state() == one_by_one.state()
        for server in (one_by_one, together):
            server.clock.advance(seconds)
    active, held = together.told()
    assert (active, held) == one_by_one.told()
    holds = together.controller.adapters.admission.holds
    assert held == {client: held for client, held in holds.of_clients().items() if held}


def commands(server):
    """What its shard is sent now: one message."""
    (data,) = server.shard.commands.take()
    return pb.ShardCommands.FromString(data).commands


def test_a_batch_tells_shards_once_and_nothing_that_it_took_back():
    server = Server()
    uses = list[pb.Uses]()

    def batch(entries):
        server.batch(0, entries)
        server.controller.adapters.admission.tell_ended()
        uses.extend(command.uses for command in commands(server) if command.HasField("uses"))

    batch([acquire(["a"], 1)])
    batch([release([1]), acquire(["b"], 2), acquire(["a"], 3)])
    batch([release([1, 2])])
    changes = [(sorted(one.active.more), sorted(one.active.fewer)) for one in uses if one.holds]
    assert changes == [([1], []), ([2], []), ([], [1, 2])]
    client = server.proofs[0].client
    holds = [[(one.client, sorted(one.more), sorted(one.fewer)) for one in each.holds] for each in uses if each.holds]
    assert holds == [[(client, *change)] for change in changes]


def test_shards_that_are_behind_get_all_that_changed_meanwhile_in_one_command():
    server = Server()
    for record in server.controller.adapters.catalog.records():
        server.controller.adapters.sync.require(record)
    server.shard.commands.take()
    for ticket, name in enumerate("ab", 1):
        server.batch(0, [acquire([name], ticket)])
    server.batch(0, [release([1])])
    server.controller.adapters.admission.tell_ended()
    uses = commands(server)[0].uses
    assert ([*uses.active.more], [*uses.active.fewer]) == ([2], [1])
    assert [([*one.more], [*one.fewer]) for one in uses.holds] == [([1], []), ([2], []), ([], [1])]
    server.batch(0, [acquire(["a"], 3)])
    server.shard.commands.send(pb.ShardCommand(drop=9))
    server.batch(0, [release([1])])
    server.controller.adapters.admission.tell_ended()
    kinds = [command.WhichOneof("command") for command in commands(server)]
    assert kinds == ["uses", "drop", "uses"], "no command is overtaken by what comes after it"


def test_shards_hear_of_the_first_hold_and_the_last_release_of_a_client_alone():
    """In one command each, however many requests of its engine use the adapter meanwhile; of the last with what begins
    next, or once a second."""
    server, told = Server(), []
    updates = server.controller.adapters.admission.queue.updates
    send, updates._send = updates._send, lambda command: (told.append(copy.deepcopy(command.uses)), send(command))
    for ticket in (1, 2, 3):
        server.batch(0, [acquire(["a"], ticket)])
    for _ in range(3):
        server.batch(0, [release([1])])
    server.batch(1, [acquire(["b"], 4)])
    server.batch(1, [release([2])])
    for _ in range(2):
        server.controller.adapters.admission.tell_ended()
    changes = [([*one.active.more], [*one.active.fewer]) for one in told]
    assert changes == [([1], []), ([2], [1]), ([], [2])]
    first, second = (proof.client for proof in server.proofs)
    holds = [{hold.client: ([*hold.more], [*hold.fewer]) for hold in one.holds} for one in told]
    assert holds == [{first: ([1], [])}, {first: ([], [1]), second: ([2], [])}, {second: ([], [2])}]
