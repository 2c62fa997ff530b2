"""Events on their socket: the frames of vLLM, batches, replay, silence, and readers that do not read."""

import contextlib
import threading
import time

import msgspec
import pytest
import zmq

from lora_server.access.identity import Identity, Role
from lora_server.access.names import Names
from lora_server.cli import live
from lora_server.control.adapters.records import Record
from lora_server.control.events.log import EventLog
from lora_server.control.events.topics import may_read
from lora_server.control.rpc.events import EventsService
from lora_server.errors import ConfigError, PermissionDeniedError, ServerUnavailableError
from lora_server.timings import Timings
from lora_server.wire import lora_server_pb2 as pb
from lora_server.wire.event_stream import EventStream
from lora_server.wire.events import (
    ADAPTER,
    SHARD,
    AdapterAdded,
    AdapterRemoved,
    EventBatch,
    ResidencyChanged,
    ShardChanged,
    decode,
    encode,
)
from tests.support.controllers import ToldShard, kept, registration
from tests.support.followed_events import Publishing, taken
from tests.support.serving import HANG_SECONDS, until


def added(number):
    return AdapterAdded(f"a{number}", "v", number, 4, 100)


def test_frames_are_those_of_vllm(tmp_path, stack):
    """Topic, 8-byte big-endian sequence, msgpack of [ts, [{"type": ..., ...}]]: vLLM's KVEventBatch."""
    publishing = Publishing(tmp_path, stack)
    context = stack.enter_context(zmq.Context())
    socket = stack.enter_context(context.socket(zmq.SUB))
    socket.subscribe(b"adapter/")
    socket.connect(publishing.endpoint)
    assert socket.poll(HANG_SECONDS * 1e3), "a heartbeat says that the subscription works"
    topic, sequence, payload = socket.recv_multipart()
    assert (topic, msgspec.msgpack.decode(payload)[1]) == (b"adapter//", [])
    publishing.events.publish(ADAPTER, "law", added(1))
    while not (batch := msgspec.msgpack.decode(payload))[1]:
        topic, sequence, payload = socket.recv_multipart()
    assert int.from_bytes(sequence, "big") == publishing.events.epoch + 1
    assert batch[0] == pytest.approx(time.time(), abs=HANG_SECONDS)
    fields = {"name": "a1", "version": "v", "handle": 1, "lora_rank": 4, "bytes": 100}
    assert batch[1] == [{"type": "AdapterAdded", **fields}]


def test_events_of_one_moment_are_one_batch(tmp_path, stack):
    publishing = Publishing(tmp_path, stack, timings=Timings(event_batch=0.2))
    reader = publishing.reader("adapter")
    for number in range(50):
        publishing.events.publish(ADAPTER, "law", added(number))
    assert [one.handle for one in taken(reader, 50)] == [*range(50)]
    assert publishing.events.sequences()["adapter//"] == publishing.events.epoch + 1


def test_a_reader_that_missed_a_batch_gets_it_by_grpc(tmp_path, stack):
    publishing = Publishing(tmp_path, stack)
    reader = publishing.reader("adapter")
    publishing.events.publish(ADAPTER, "law", added(1))
    publishing.events.take()  # nobody sends this one
    assert [one.handle for one in taken(reader, 1)] == [1], "the heartbeat shows that it is missing"
    assert reader.reader.gaps == 1
    publishing.events.publish(ADAPTER, "law", added(2))
    assert [one.handle for one in taken(reader, 1)] == [2]
    assert reader.reader.gaps == 1


def test_a_reader_that_missed_more_than_is_kept_is_told(tmp_path, stack):
    publishing = Publishing(tmp_path, stack, depth=3)
    reader = publishing.reader("adapter")
    for number in range(10):
        publishing.events.publish(ADAPTER, "law", added(number))
        publishing.events.take()
    with pytest.raises(ServerUnavailableError, match="adapter//: some are lost"):
        taken(reader, 1)


def test_silence_is_noticed(tmp_path, stack):
    publishing = Publishing(tmp_path, stack, timings=Timings(event_silence=0.7))
    reader = publishing.reader()
    publishing.events.publish(ADAPTER, "law", added(1))
    taken(reader, 1)
    publishing.publisher.close()
    with pytest.raises(ServerUnavailableError, match="no heartbeat, for"):
        until(lambda: reader.take(0.1) and False, "it is silent")


def test_a_stalled_reader_holds_up_neither_publishers_nor_readers(tmp_path, stack):
    """It never reads; the others have each event, in order, and `publish` takes no longer."""
    publishing = Publishing(tmp_path, stack, timings=Timings(event_batch=0.0))
    stalled, reader = publishing.reader(), publishing.reader("adapter")
    heavy = AdapterAdded("x" * 4000, "v", 0, 4, 100)
    slowest, count = 0.0, 4000

    def publish():
        nonlocal slowest
        for _ in range(count):
            began = time.monotonic()
            publishing.events.publish(ADAPTER, "law", heavy)
            slowest = max(slowest, time.monotonic() - began)

    thread = threading.Thread(target=publish)
    thread.start()
    assert len(taken(reader, count)) == count
    thread.join()
    assert slowest < 1.0
    assert stalled.silent_seconds >= 0


def test_a_server_without_events_says_so():
    service = EventsService(EventLog(), "")
    with pytest.raises(ConfigError, match="--events: got off"):
        service.Open(pb.OpenEventsRequest(), Identity("", Role.VIEWER))


def test_nothing_is_kept_before_a_publisher_follows():
    log = EventLog()
    log.publish(SHARD, "", ShardChanged(0, 0, 0, "up"))
    assert log.take() == []


def test_a_socket_that_cannot_be_seen_is_named(tmp_path, stack):
    publishing = Publishing(tmp_path, stack)
    publishing.publisher.close()
    (tmp_path / "events.sock").unlink(missing_ok=True)
    with pytest.raises(ServerUnavailableError, match=r"events.sock cannot be seen from here"):
        EventStream(publishing.address)


def test_status_watch_refreshes_when_an_event_comes(tmp_path, stack, monkeypatch):
    monkeypatch.setattr(live, "SECONDS", HANG_SECONDS)
    publishing = Publishing(tmp_path, stack)
    pause = stack.enter_context(contextlib.closing(live.EventPause(publishing.address)))
    waiting = threading.Thread(target=pause.wait)
    began = time.monotonic()
    waiting.start()

    def ends():
        publishing.events.publish(ADAPTER, "law", added(1))
        return not waiting.is_alive()

    until(ends, "the pause ends")
    assert time.monotonic() - began < HANG_SECONDS / 2


def test_status_watch_refreshes_also_without_events(monkeypatch):
    monkeypatch.setattr(live, "SECONDS", 0.3)
    pause = live.EventPause("127.0.0.1:1")
    began = time.monotonic()
    pause.wait()
    assert time.monotonic() - began >= 0.3


# -- which events there are, and whose


def test_an_adapters_events_tell_its_life(tmp_path, stack):
    publishing = Publishing(tmp_path, stack)
    reader = publishing.reader("adapter", "residency")
    shard = ToldShard(publishing.controller)
    stack.callback(shard.close)
    adapters = publishing.controller.adapters
    record = Record.decode(kept("law", 70_000).record)
    with adapters.changes.lock:
        adapters.changes.offer(record, eager=True)
    until(lambda: adapters.sync.state(70_000) == "ready", "the shard has it")
    with adapters.changes.lock:
        adapters.changes.unlist(record)
    found = []

    def is_told():
        found.extend(event for one in reader.take(0.5) for event in one.batch.events)
        came = [one for one in found if isinstance(one, ResidencyChanged) and one.state == "ready"]
        return came and any(isinstance(one, AdapterRemoved) for one in found)

    until(is_told, "topics are in no common order")
    changes = [(type(one), one.name) for one in found if not isinstance(one, ResidencyChanged)]
    assert changes == [(AdapterAdded, "law"), (AdapterRemoved, "law")]


@pytest.mark.parametrize("state", ["left", "lost"])
def test_a_shards_end_is_an_event(tmp_path, stack, state):
    publishing = Publishing(tmp_path, stack)
    reader, controller = publishing.reader("shard"), publishing.controller
    digest = controller.agreement.digest()
    handle = controller.arrivals.arrive(registration(0, pid=7, agreement_digest=digest), [])
    handle.leaving = state == "left"
    controller.arrivals.depart(handle)
    assert [(one.pid, one.state) for one in taken(reader, 2)] == [(7, "up"), (7, state)]


def test_advice_is_published_when_it_changes(tmp_path, stack):
    publishing = Publishing(tmp_path, stack)
    until(lambda: publishing.events.since("advice//", publishing.events.epoch)[0], "the first is published")
    reader = publishing.reader("advice")
    shard = ToldShard(publishing.controller)
    stack.callback(shard.close)
    assert [one.reason for one in taken(reader, 1)] == ["registering adapters"]


def test_a_tenant_reads_its_own_topics_and_those_of_the_operators_adapters():
    acme = Identity("acme", Role.ADMIN)
    for topic in ("adapter/acme/", "residency/acme/", "admission/acme/", "adapter//", "residency//", "shard//"):
        assert may_read(acme, topic), topic
    for topic in ("", "adapter/", "adapter/rival/", "adapter/acm", "admission//", "advice//", "adapter/acme/x"):
        assert not may_read(acme, topic), topic
    assert may_read(Identity("", Role.ENGINE), "adapter/rival/")


def test_a_tenant_neither_opens_over_ipc_nor_replays_what_is_anothers():
    service, acme = EventsService(EventLog(), "ipc://x"), Identity("acme", Role.ENGINE)
    with pytest.raises(PermissionDeniedError, match="over ipc a reader sees all tenants' events"):
        service.Open(pb.OpenEventsRequest(), acme)
    with pytest.raises(PermissionDeniedError, match="topic 'adapter/rival/'"):
        service.Replay(pb.ReplayEventsRequest(topic="adapter/rival/"), acme)
    assert not service.Replay(pb.ReplayEventsRequest(topic="adapter/acme/", since=service._events.epoch), acme).lost


def test_an_event_of_an_adapter_goes_to_the_topics_of_the_tenants_that_see_it():
    log = EventLog()
    log.follow(lambda: None)
    shared = {"acme/bot": {"rival"}, "acme/all": {""}}
    log.viewers = Names(frozenset({"acme", "rival"}), shared).viewers
    for name in ("law", "acme/own", "acme/bot", "acme/all"):
        log.publish(ADAPTER, name, AdapterRemoved(name, "v"))
    found = {one.topic: [event["name"] for event in msgspec.msgpack.decode(one.payload)[1]] for one in log.take()}
    assert found.pop("adapter//") == ["law", "acme/all"]
    assert found == {"adapter/acme/": ["acme/own", "acme/bot"], "adapter/rival/": ["acme/bot"]}


def test_a_batch_is_decoded_as_it_was_encoded():
    batch = EventBatch(1.5, [added(1), AdapterRemoved("law", "v")])
    assert decode(encode(batch)) == batch


def test_no_position_of_an_earlier_controller_is_taken_for_one_of_this(clock):
    logs = []
    for _ in range(2):
        logs.append(EventLog(clock))
        logs[-1].follow(lambda: None)
        for number in range(5):
            logs[-1].publish(SHARD, "", ShardChanged(number, 0, 0, "up"))
            logs[-1].take()
        clock.advance(0.001)
    earlier, later = (log.sequences()["shard//"] for log in logs)
    assert logs[1].since("shard//", earlier)[1], "it has to begin anew"
    assert not logs[1].since("shard//", later)[1]
