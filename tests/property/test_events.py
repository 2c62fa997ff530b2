"""Events under any loss: a reader has all of them in order, or knows that some are lost."""

from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st

from lora_server.access.identity import ANYBODY
from lora_server.control.events.log import EventLog
from lora_server.control.rpc.events import EventsService
from lora_server.errors import ServerUnavailableError
from lora_server.wire import lora_server_pb2 as pb
from lora_server.wire.event_stream import TopicReader
from lora_server.wire.events import ADMISSION, SHARD, RequestQueued, ShardChanged, decode

DEPTH = 12
KINDS = {SHARD: lambda n: ShardChanged(n, 0, 0, "up"), ADMISSION: lambda n: RequestQueued(("a",), n)}
# what happens: an event of a kind and a tenant, or messages that a reader gets (True) or not
STEPS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(sorted(KINDS)), st.sampled_from(["", "acme"])),
        st.tuples(st.just("sent"), st.booleans()),
        st.tuples(st.just("heartbeat"), st.booleans()),
    ),
    max_size=80,
)


def number_of(event):
    return event.shard if isinstance(event, ShardChanged) else event.client


@given(STEPS)
def test_a_reader_has_every_event_in_order_or_knows_that_some_are_lost(steps):
    log = EventLog(depth=DEPTH)
    log.follow(lambda: None)
    service, replays = EventsService(log, "ipc://x"), []

    def replay(topic, since):
        replays.append(topic)
        return service.Replay(pb.ReplayEventsRequest(topic=topic, since=since), ANYBODY)

    reader, got, made = TopicReader(log.epoch, log.sequences(), replay), defaultdict(list), defaultdict(list)
    lost = False
    for number, (what, more) in enumerate([*steps, ("sent", False), ("heartbeat", True), ("heartbeat", True)]):
        if what in KINDS:
            log.publish(what, more, KINDS[what](number))
            made[f"{what}/{more}/"].append(number)
            continue
        for message in log.take() if what == "sent" else log.heartbeats() if more else ():
            if not (more or what == "heartbeat"):
                continue
            try:
                for batch in reader.read(message.topic, message.sequence, decode(message.payload)):
                    got[batch.topic] += map(number_of, batch.batch.events)
            except ServerUnavailableError:
                lost = True
        if lost:
            break
    kept = sum(map(len, made.values()))
    if lost:
        assert kept > DEPTH, "nothing is lost that the ring has"
        for topic, numbers in got.items():
            assert numbers == made[topic][: len(numbers)], "and what came before is in order"
    else:
        assert got == {topic: numbers for topic, numbers in made.items() if numbers}
        assert reader.gaps == len(replays)


@given(st.integers(0, 3 * DEPTH), st.integers(-2, 3 * DEPTH + 2))
def test_the_ring_says_whether_it_has_all_after_a_sequence(published, since):
    log = EventLog(depth=DEPTH)
    log.follow(lambda: None)
    for number in range(published):
        log.publish(SHARD, "", ShardChanged(number, 0, 0, "up"))
        log.take()
    found, lost = log.since("shard//", log.epoch + since)
    first = max(since + 1, published - DEPTH + 1, 1)
    assert [one.sequence - log.epoch for one in found] == [*range(first, published + 1)]
    assert lost == (not max(0, published - DEPTH) <= since <= published)
