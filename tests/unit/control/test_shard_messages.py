"""What waits at either end of a shard's stream goes in one message, as far as that has room."""

import queue

from lora_server.control.members.shards import joined
from lora_server.daemon.stream import messages_of
from lora_server.wire import bounds
from lora_server.wire import lora_server_pb2 as pb


def command(handle, nbytes=0):
    load = pb.Load(handle=handle, path="x" * nbytes)
    return pb.ShardCommands(commands=[pb.ShardCommand(load=load)]).SerializeToString()


def handles(message):
    return [one.load.handle for one in pb.ShardCommands.FromString(message).commands]


def test_commands_that_wait_are_one_message_in_their_order():
    assert [handles(one) for one in joined(map(command, range(1, 100)))] == [[*range(1, 100)]]
    assert [*joined([])] == []


def test_a_message_ends_before_it_is_too_large_and_a_large_command_has_its_own():
    most = bounds.MESSAGE_BYTES
    sizes = [most // 2, most // 3, most // 2, bounds.KEPT_BYTES, 1]
    sent = [*joined(command(handle, nbytes) for handle, nbytes in enumerate(sizes, 1))]
    assert [handles(one) for one in sent] == [[1, 2], [3], [4], [5]]


def reports(*found):
    waiting = queue.SimpleQueue()
    for one in found:
        waiting.put(one if one is None else pb.ShardReport(done=pb.Done(command=one[0], message="x" * one[1])))
    return waiting


def test_reports_that_wait_are_one_message_and_the_stream_ends_behind_them():
    sent = messages_of(reports((1, 0), (2, 0), (3, 0), None))
    assert [[one.done.command for one in message.reports] for message in sent] == [[1, 2, 3]]


def test_the_largest_message_of_reports_is_one_that_a_controller_takes():
    large = bounds.KEPT_BYTES  # the most that a report keeps
    sent = [*messages_of(reports((1, bounds.MESSAGE_BYTES - 20), (2, large), (3, large), None))]
    assert [[one.done.command for one in message.reports] for message in sent] == [[1, 2], [3]]
    assert max(message.ByteSize() for message in sent) <= bounds.REQUEST_BYTES


def test_a_stream_waits_for_its_first_report_alone():
    waiting = reports((1, 0))
    sent = messages_of(waiting)
    assert len(next(sent).reports) == 1
    waiting.put(None)
    assert [*sent] == []
