"""Tickets of admitted requests whose adapters load: when they are answered, and how a load that fails ends them."""

import math
import threading

import pytest

from lora_server.control.admission.queue import AdapterLoading, AdmissionQueue
from lora_server.control.admission.tickets import TicketLoads
from lora_server.control.reports.status import status
from lora_server.control.sync.residency import ResidencyTable
from lora_server.errors import AdapterFormatError, AdapterNotLoadedError, AdmissionError
from lora_server.placement import Layout, Placement
from lora_server.wire import lora_server_pb2 as pb
from tests.support.controllers import SPEC, ToldShard, kept, make_controller, moved
from tests.support.serving import HANG_SECONDS, until

HANDLES = {"law": 1, "art": 2}
LAYERS = SPEC.layers


class Loads:
    """A queue whose adapters load as the test says; `now` is its clock."""

    def __init__(self):
        self.left, self.now = dict.fromkeys(HANDLES.values(), 0.0), 0.0
        resolve, loads = HANDLES.__getitem__, TicketLoads(self.left.__getitem__, limit_seconds=60.0)
        self.queue = AdmissionQueue(lambda names: [*map(resolve, names)], clock=lambda: self.now, loads=loads)

    def ask(self, number=1, names=("law",), pace=0.0):
        return self.queue.acquire(1, number, names, pace=pace)


def test_a_ticket_is_answered_once_its_adapters_load_within_its_pace():
    loads = Loads()
    loads.left |= {1: 3.0, 2: 1.0}
    assert loads.ask(1, ("law", "art"), pace=0.5) == AdapterLoading([1, 2], 3.0), "the slower of both"
    assert loads.queue.holds.of(1) == {1, 2}, "they have their places meanwhile"
    assert loads.ask(2, pace=None) == [1], "without a pace it is answered when admitted"
    assert loads.ask(3, ("art",), pace=1.0) == [2], "an adapter that loads within the pace is not waited for"
    loads.left[1] = 1.0
    assert not loads.queue.answer({}) and loads.queue.tickets.is_open((1, 1))
    loads.left |= {1: 0.5, 2: 0.0}
    assert loads.queue.answer({}) and not loads.queue.tickets.is_open((1, 1))
    assert loads.ask(1, ("law", "art"), pace=0.5) == [1, 2]
    loads.left[1] = math.inf
    assert loads.ask(0) == [1], "a ticket of number 0 is answered now"


def test_a_load_that_fails_ends_its_tickets_alone_by_name_and_they_hold_nothing():
    loads = Loads()
    loads.left |= {1: math.inf, 2: 1.0}
    assert loads.ask(1) == AdapterLoading([1], math.inf) and loads.ask(2, ("art",)) == AdapterLoading([2], 1.0)
    assert loads.queue.answer({1: AdapterFormatError("no such tensor")})
    with pytest.raises(AdapterFormatError, match="adapter 'law': no such tensor"):
        loads.ask(1)
    assert loads.queue.holds.of(1) == {2} and loads.queue.tickets.is_open((1, 2))
    loads.now = 60.0
    assert loads.queue.answer({})
    with pytest.raises(AdapterNotLoadedError, match=r"\['art'\]: still loading 60 s after"):
        loads.ask(2, ("art",))
    assert not loads.queue.holds.handles()


@pytest.mark.parametrize("way", ["cancelled", "client gone"])
def test_a_loading_ticket_that_is_not_wanted_any_more_holds_nothing(way):
    loads = Loads()
    loads.left[1] = 1.0
    assert loads.ask(1) == AdapterLoading([1], 1.0)
    loads.queue.cancel(1, [1]) if way == "cancelled" else loads.queue.forget_client(1)
    assert not loads.queue.tickets.any_open and not loads.queue.holds.handles()
    loads.left[1] = 0.0
    if way == "cancelled":
        with pytest.raises(AdmissionError, match="cancelled"):
            loads.ask(1)


def test_an_adapter_is_loaded_when_the_slowest_shard_has_it():
    table = ResidencyTable(Placement(SPEC, Layout.parse("ep1-pp2")))
    assert table.seconds_left(1) == math.inf, "nothing is known yet"
    table.report(0, pb.Residency(handle=1, layers=LAYERS // 2))
    assert table.seconds_left(1) == math.inf
    table.report(1, pb.Residency(handle=1, layers=1, expected_us=2_500_000, error_code="adapter", error="disk"))
    assert (table.seconds_left(1), table.error(1, last_load=True)) == (2.5, "disk")
    table.report(1, pb.Residency(handle=1, layers=LAYERS // 2))
    assert (table.seconds_left(1), table.error(1, last_load=True)) == (0.0, "")
    table.forget_shard(0)
    assert table.seconds_left(1) == math.inf, "a shard that was restarted loads it again"


@pytest.fixture
def served(stack):
    """A controller with one shard, which has said that `law` is on its disk."""
    controller = make_controller()
    shard = ToldShard(controller, pool_bytes=10)
    stack.callback(shard.close)
    controller.adapters.recovery.adopt([kept(name, handle) for name, handle in HANDLES.items()], (), 0)
    controller.adapters.sync.settle()
    until(lambda: controller.adapters.sync.residency.seconds_left(1) == 0.0, "the shard was told of it")
    tell(controller, shard, layers=0, measured=True, bytes=4)
    lease, _ = controller.clients.join("engine")
    return controller, shard, lease.proof


def tell(controller, shard, **fields):
    moved(controller, shard.handle, [pb.Residency(handle=1, **fields)])


def test_a_client_that_waits_is_woken_by_the_report_that_its_adapter_is_loaded(served):
    controller, shard, proof = served
    requests, told = controller.requests, []
    assert requests.acquire(proof, ["law"], 1, pace=0.0).loading == math.inf
    tell(controller, shard, layers=1, expected_us=40_000)
    answer = requests.acquire(proof, ["law"], 1, pace=0.0)
    assert (answer.loading, answer.queued, [one.handle for one in answer.records]) == (0.04, None, [1])
    told_so = status(controller)
    assert [(one.name, one.requests, one.expected_us) for one in told_so.loading] == [("law", 1, 40_000)]
    assert told_so.num_loading == 1
    wait, client = controller.adapters.admission.wait_admitted, proof.client
    waiter = threading.Thread(target=lambda: told.extend(wait(client, [1], HANG_SECONDS)))
    waiter.start()
    tell(controller, shard, layers=LAYERS)
    waiter.join(HANG_SECONDS)
    assert told == [1] and requests.acquire(proof, ["law"], 1).loading is None
    assert not status(controller).loading and sum(controller.adapters.admission.queue.counters.loads.counts) == 1


def test_an_adapter_that_is_taken_from_its_clients_ends_its_loading_tickets(served):
    controller, _, proof = served
    assert controller.requests.acquire(proof, ["law"], 1, pace=0.0).loading is not None
    controller.adapters.rollout.remove("law", 0.0)
    controller.adapters.admission.cut_off()
    assert controller.requests.wait_admitted(proof, [1], 0.0) == [1]
    with pytest.raises(Exception, match="adapter 'law': it was removed while it loaded"):
        controller.requests.acquire(proof, ["law"], 1)
