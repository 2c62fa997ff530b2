"""lora-server drain: requests end, new ones wait, and a shard that is started anew meanwhile fails none of them."""

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from client_connector.transformers import attach
from lora_server.errors import ServerUnavailableError
from tests.support.serving import HANG_SECONDS, answers, cli, reached, status, until
from tests.support.workload import workload

NAME = "fused"


class Requests(threading.Thread):
    """One after another, each with its own hold; every answer has to be PEFT's."""

    def __init__(self, server):
        super().__init__(daemon=True)
        self.server, self.answered, self.failed, self.stopping = server, 0, None, threading.Event()

    def run(self):
        load = workload("mixtral")
        try:
            with attach(load.model, server=self.server.address, timeout_seconds=HANG_SECONDS) as lora:
                while not self.stopping.is_set():
                    assert answers(lora, load, NAME)
                    self.answered += 1
        except Exception as error:
            self.failed = error

    def goes_on(self):
        seen = self.answered
        until(lambda: self.failed is not None or self.answered > seen + 1, "requests are answered")
        assert self.failed is None, self.failed

    def __enter__(self):
        self.start()
        self.goes_on()
        return self

    def __exit__(self, *_):
        self.stopping.set()
        self.join(HANG_SECONDS)
        assert self.failed is None, self.failed


def drain(server, *arguments):
    return cli("drain", "--server", server.address, *arguments)


def admit_again(server):
    done = drain(server, "--undo")
    assert (done.returncode, done.stdout) == (0, "requests are admitted again\n"), done.stderr


@pytest.mark.parametrize("shard", [0, pytest.param(1, marks=pytest.mark.long)])
def test_no_request_fails_while_a_shard_is_started_anew(server, shard):
    before = {one.shard: one.pid for one in status(server.address).shards}
    with Requests(server) as requests:
        done = drain(server, "--shard", str(shard))
        assert (done.returncode, done.stdout) == (0, f"shard {shard} was started anew\n"), done.stderr
        requests.goes_on()
    after = {one.shard: one.pid for one in status(server.address).shards}
    assert {one for one in after if after[one] != before[one]} == {shard}


def test_a_drained_server_admits_no_request_until_that_is_taken_back(load, server):
    assert drain(server).returncode == 0
    with pytest.raises(ServerUnavailableError, match="draining"):
        attach(load.model, server=server.address, timeout_seconds=5)
    admit_again(server)
    with attach(load.model, server=server.address, timeout_seconds=HANG_SECONDS) as lora:
        with lora.adapters([NAME]):
            done = drain(server, "--seconds", "0.2")
            assert (done.returncode, "1 adapters are still in use" in done.stderr) == (1, True), done.stderr
        assert drain(server).returncode == 0
        assert server.get("/readyz") == (503, "draining\n")
        again = drain(server, "--shard", "0")
        assert (again.returncode, "--undo" in again.stderr) == (1, True)
        admitted = threading.Event()

        def ask():
            with lora.adapters([NAME]):
                admitted.set()

        waiting = threading.Thread(target=ask, daemon=True)
        waiting.start()
        until(lambda: status(server.address).queued == 1, "it waits")
        assert not admitted.is_set()
        admit_again(server)
        assert admitted.wait(HANG_SECONDS)
        waiting.join(HANG_SECONDS)
    assert server.get("/readyz")[0] == 200


def test_a_drain_goes_on_when_the_controller_is_killed(load, server):
    with (
        attach(load.model, server=server.address, timeout_seconds=HANG_SECONDS) as lora,
        ThreadPoolExecutor(1) as threads,
    ):
        with lora.adapters([NAME]):
            draining = threads.submit(drain, server, "--seconds", str(HANG_SECONDS))
            until(lambda: server.get("/readyz") == (503, "draining\n"), "it drains")
            before = status(server.address).pid
            os.kill(before, signal.SIGKILL)
            until(lambda: (reply := reached(server.address)) and reply.pid != before, "it has a successor")
            until(lambda: server.get("/readyz") == (503, "draining\n"), "which drains")
            assert not draining.done()
        done = draining.result(HANG_SECONDS)
        assert (done.returncode, "no request runs" in done.stdout) == (0, True), done.stderr
    admit_again(server)
    until(lambda: server.get("/readyz")[0] == 200, "requests are admitted again")


def test_a_shard_in_use_is_left_alone(load, server):
    before = [one.pid for one in status(server.address).shards]
    with attach(load.model, server=server.address, timeout_seconds=HANG_SECONDS) as lora, lora.adapters([NAME]):
        done = drain(server, "--shard", "1", "--seconds", "0.2")
        assert (done.returncode, "1 adapters were still in use" in done.stderr) == (1, True), done.stderr
    assert [one.pid for one in status(server.address).shards] == before
    until(lambda: server.get("/readyz")[0] == 200, "requests are admitted again")
    for wrong, words in ((["--shard", "7"], "expected one of 0 to 1"), (["--seconds", "-1"], "expected 0 to")):
        done = drain(server, *wrong)
        assert done.returncode == 2 and words in done.stderr
