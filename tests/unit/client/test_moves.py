"""A client's move to another layout's shards: the thread of the heartbeats offers it, that of the steps takes it."""

from client_connector.moves import Move, MoveSlot
from lora_server.placement import Layout, Placement
from lora_server.wire.terms import Terms
from tests.support.workload import spec_of


class CountedLink:
    closed = 0

    def close(self):
        self.closed += 1


def move(generation):
    placement = Placement(spec_of("mixtral"), Layout(1, 1), generation)
    return Move(Terms(1, 1, placement, "independent", 64), [CountedLink()])


def test_a_move_counts_as_made_once_no_step_can_go_the_old_way():
    slot, offered = MoveSlot(), move(2)
    assert slot.take() is None
    slot.offer(offered)
    assert slot.next() is None, "the step that began before it is under way"
    slot.end()
    assert slot.next() is offered, "the next step takes it first"
    assert slot.take() is offered and slot.next() is None
    slot.end()
    assert slot.take() is None and not offered.links[0].closed


def test_only_the_last_move_is_taken_and_none_after_the_end():
    slot, (first, second, late) = MoveSlot(), map(move, (2, 3, 4))
    slot.offer(first)
    slot.offer(second)
    assert first.links[0].closed == 1 and slot.next() is second
    slot.close()
    slot.offer(late)
    assert second.links[0].closed == late.links[0].closed == 1 and slot.take() is None
