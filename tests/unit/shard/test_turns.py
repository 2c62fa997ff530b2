"""A large step is served a turn at a time: small ones pass it, its bits stay, and its client may go in the middle."""

import pytest

from tests.support.rig import MAX_ROWS, Client, loaded_rig

pytestmark = pytest.mark.usefixtures("quiet")
LARGE = MAX_ROWS // 2  # tokens of two entries each


@pytest.fixture
def shard(tiny_adapters):
    """A shard whose loop is the test's, and which looks for other steps after each part of one."""
    with loaded_rig(tiny_adapters["all"], turn_seconds=0.0) as rig:
        yield rig.shard


def push(client, rows):
    return client.push(client.request(rows=rows))


def answered(client, seq):
    return client.link.responded() >= seq


def begin(shard, client):
    """A large step, begun and no more."""
    seq = push(client, LARGE)
    assert shard.serve_once() and shard.serve_once()
    assert shard._pending[client.client].work is not None and not answered(client, seq)
    return seq


def finish(shard, client, seq):
    """The answer; how many turns it took."""
    turns = 0
    while not answered(client, seq):
        assert shard.serve_once()
        turns += 1
    return client.answer(seq)[1], turns


def test_a_small_step_passes_a_large_one_that_is_begun(shard):
    large, small = Client(shard, 1), Client(shard, 2)
    alone, _ = finish(shard, large, begin(shard, large))
    seq = begin(shard, large)
    passing = push(small, 1)
    while not answered(small, passing):
        assert shard.serve_once()
        assert not answered(large, seq), "the small one's answer is the first"
    passed, turns = finish(shard, large, seq)
    assert passed == alone and turns > 1, "not a bit of it is another, and it was not begun anew"
    later = begin(shard, large)
    same = push(small, LARGE)
    finish(shard, large, later)
    assert not answered(small, same), "what is as large waits"
    finish(shard, small, same)


@pytest.mark.parametrize("how", ["revoked", "closed", "joined anew"])
def test_a_client_that_goes_in_the_middle_of_its_step_leaves_nothing_behind(how, shard):
    large, small = Client(shard, 1), Client(shard, 2)
    begin(shard, large)
    if how == "revoked":
        shard.port.revoke(1)
    elif how == "closed":
        large.link.close()
    else:
        anew = Client(shard, 1, epoch=2)
        finish(shard, anew, push(anew, LARGE))
    finish(shard, small, push(small, 1))
    assert not shard._pending and shard.counters.failed == 0
    shard.store.drop(7)
    shard.store.check_integrity()


def test_no_more_than_a_few_are_begun(shard):
    """Each keeps its buffers: what would pass the last of them waits for it."""
    clients, seqs = [Client(shard, number) for number in range(1, 7)], []
    for client, rows in zip(clients, range(LARGE, 0, -1), strict=False):
        seqs.append(push(client, rows))
        assert shard.serve_once()
    begun = [number for number, step in shard._pending.items() if step.work is not None]
    assert begun == [1, 2, 3, 4]
    for client, seq in zip(clients, seqs, strict=True):
        finish(shard, client, seq)
