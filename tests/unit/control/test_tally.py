"""How often each adapter was held: sums that only grow, of a bounded number of names, and of all others."""

import random

from lora_server.control.admission.holds import Holds
from lora_server.control.admission.tally import Sum, Tally

NAMES = {handle: f"tenant-{handle}" for handle in range(1, 40)}


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def test_every_end_of_a_hold_counts_once():
    clock = Clock()
    tally = Tally(NAMES.get, clock)
    holds = Holds(tally.changed)
    holds.acquire(1, [1, 1, 2])
    clock.now = 2.0
    holds.release(1, [1, 3])  # what is not held is ignored
    holds.restore(2, [2, 2])
    clock.now = 5.0
    holds.forget_client(1)
    holds.acquire(2, [99])  # an adapter that is gone when its holds end
    clock.now = 6.0
    holds.forget_client(2)
    own, others = tally.sums()
    assert own == {"tenant-1": Sum(2, 7.0), "tenant-2": Sum(3, 5.0 + 4.0 + 4.0)}
    assert others == Sum(1, 1.0)


def test_the_hot_ones_get_names_and_every_hold_adds_to_one_sum():
    """First the tail is called, then a few hot ones: they take the places, and a difference is what ended between."""
    clock, rng = Clock(), random.Random(3)
    tally = Tally(NAMES.get, clock, most=4, review=50)
    seen = {"(other)": Sum()}
    for turn in range(600):
        handle = rng.randrange(10, 40) if turn < 200 or turn % 3 == 0 else rng.choice([1, 2])
        tally.changed(handle, 1)
        clock.now += 1
        tally.changed(handle, -1)
        own, others = tally.sums()
        now = {**own, "(other)": others}
        looked = seen.keys() - now.keys() or (turn + 1) % 50 == 0
        more = sum(one.holds - seen.get(name, Sum()).holds for name, one in now.items())
        assert len(own) <= 4 and (more == 1 or (looked and more == 0)), (turn, more)
        seen = now
    assert {"tenant-1", "tenant-2"} <= own.keys()
