"""No two locks of a shard or of a controller are taken in two orders; and the check sees it where they are."""

import subprocess
import sys
import threading

import pytest

from tests.lock_order import LockOrder, OrderedLock
from tests.support.serving import HANG_SECONDS

WHERE = ["tests/unit/memory", "tests/property/test_unasked_schedules.py", "tests/unit/control/test_admission.py"]


@pytest.mark.parametrize(("second", "circles"), [("ab", 0), ("ba", 1)])
def test_two_orders_are_a_circle(second, circles):
    order = LockOrder()
    locks = {name: OrderedLock("RLock", name, order) for name in "ab"}
    conditions = {name: threading.Condition(lock) for name, lock in locks.items()}

    def take(names):
        with conditions[names[0]], conditions[names[0]], locks[names[1]]:
            pass

    for names in ("ab", second):
        thread = threading.Thread(target=take, args=(names,))
        thread.start()
        thread.join(HANG_SECONDS)
    assert len(order.circles) == circles
    assert all("a, then b" in one and "b, then a" in one and "in take" in one for one in order.circles)


def test_a_lock_that_a_wait_gives_up_is_not_held():
    order = LockOrder()
    first, second = threading.Condition(OrderedLock("RLock", "a", order)), OrderedLock("Lock", "b", order)
    with first:
        first.wait(0.001)
        with second:
            pass
    with first, first:
        first.wait(0.001)
        assert order.held == [first._lock] * 2
    assert not order.held and not order.circles


@pytest.mark.long
def test_shards_and_controllers_take_locks_in_one_order():
    command = [sys.executable, "-m", "pytest", "-p", "tests.lock_order", "-m", "not long", *WHERE]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert ended.returncode == 0, ended.stdout[-20_000:]
