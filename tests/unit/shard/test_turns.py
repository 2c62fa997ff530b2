"""A large step is served a turn at a time: small ones pass it, its bits stay, and its client may go in the middle."""

from __future__ import annotations

import pytest

from lora_server.transport.shm import ShmLink
from lora_server.transport.shm_listener import ShmListener
from lora_server.transport.tcp import TcpLink
from lora_server.transport.tcp_listener import TcpListener
from tests.support.rig import MAX_ROWS, Client, loaded_rig
from tests.support.serving import until

pytestmark = pytest.mark.usefixtures("quiet")
LARGE = MAX_ROWS // 2  # tokens of two entries each


class Served:
    """A shard whose loop is the test's, and which looks around after each part of a step."""

    def __init__(self, rig, listener, link):
        self.rig, self.shard, self._listener, self._link = rig, rig.shard, listener, link

    def client(self, number, epoch=1):
        return Client(self.shard, number, epoch, lambda hello: self._link(self._listener.address, hello, 0))

    def push(self, client, rows):
        """A step that has arrived."""
        seq = client.push(client.request(rows=rows))
        until(lambda: self.connection(client).requested() == seq, "it to arrive")
        return seq

    def connection(self, client):
        return next(one for one in self.shard.port.connections if one.client == client.client)

    def answered(self, client, seq):
        return self.connection(client).served >= seq

    def begin(self, client):
        """A large step, begun and no more."""
        seq = self.push(client, LARGE)
        assert self.shard.serve_once() and self.shard.serve_once()
        assert self.shard._pending[client.client].work is not None and not self.answered(client, seq)
        return seq

    def finish(self, client, seq):
        """The answer; how many turns it took."""
        turns = 0
        while not self.answered(client, seq):
            assert self.shard.serve_once()
            turns += 1
        return client.answer(seq)[1], turns


@pytest.fixture(params=["shm", "tcp"])
def served(request, tmp_path, tiny_adapters, monkeypatch):
    monkeypatch.setattr("lora_server.shard.loop.TURN_NS", 0)
    with loaded_rig(tiny_adapters["all"]) as rig:
        if request.param == "shm":
            listener, link = ShmListener(rig.shard.port, tmp_path / "shard.sock"), ShmLink
        else:
            listener, link = TcpListener(rig.shard.port, "127.0.0.1"), TcpLink
        yield Served(rig, listener, link)
        listener.close()


def test_a_small_step_passes_a_large_one_that_is_begun(served):
    large, small = served.client(1), served.client(2)
    alone, _ = served.finish(large, served.begin(large))
    seq = served.begin(large)
    passing = served.push(small, 1)
    while not served.answered(small, passing):
        assert served.shard.serve_once()
        assert not served.answered(large, seq), "the small one's answer is the first"
    passed, turns = served.finish(large, seq)
    assert passed == alone and turns > 1, "not a bit of it is another, and it was not begun anew"
    small.answer(passing)
    later = served.begin(large)
    same = served.push(small, LARGE)
    served.finish(large, later)
    assert not served.answered(small, same), "what is as large waits"
    served.finish(small, same)
    for client in (large, small):
        client.link.close()


@pytest.mark.parametrize("how", ["revoked", "closed", "joined anew"])
def test_a_client_that_goes_in_the_middle_of_its_step(how, served):
    large, small = served.client(1), served.client(2)
    served.begin(large)
    if how == "revoked":
        served.shard.port.revoke(1)
    elif how == "closed":
        large.link.close()
        until(lambda: len(served.shard.port.connections) == 1, "it to be seen")
    else:
        anew = served.client(1, epoch=2)
        served.finish(anew, served.push(anew, LARGE))
        anew.link.close()
    served.finish(small, served.push(small, 1))
    assert not served.shard._pending and served.shard.counters.failed == 0
    served.rig.shard.store.drop(7)
    served.rig.shard.store.check_integrity()
    small.link.close(), large.link.close()


def test_no_more_than_a_few_are_begun(served):
    """Each keeps its buffers: what would pass the last of them waits for it."""
    clients, seqs = [served.client(number) for number in range(1, 7)], []
    for client, rows in zip(clients, range(LARGE, 0, -1), strict=False):
        seqs.append(served.push(client, rows))
        assert served.shard.serve_once()
    begun = [number for number, step in served.shard._pending.items() if step.work is not None]
    assert begun == [1, 2, 3, 4]
    for client, seq in zip(clients, seqs, strict=True):
        served.finish(client, seq)
        client.link.close()
