"""Whether anybody loses a lease when much is asked of the controller at once: `python -m bench.control_floods`.

Beside so many clients that only hold their leases: 1,000 adapters added at once, then 100 joins while one shard is
stopped for nine seconds. Prints what became of each call, how long a heartbeat took at most, and the leases lost.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import grpc
import psutil

from bench import harness
from client_connector.remote import RemoteServer
from lora_server.demo import tiny
from lora_server.demo.launch import running_server
from lora_server.errors import LoraServerError
from lora_server.wire import lora_server_pb2 as pb
from lora_server.wire import lora_server_pb2_grpc as rpc
from lora_server.wire.rpc import call, open_channel, translate

CONNECTIONS = 8  # of the flood
STOPPED_SECONDS = 9.0
PATIENCE = 300.0
BEAT_SECONDS = 0.1
COLUMNS = "flood {flood} | ok {ok:.0f} | s {seconds:.1f} | slowest beat {slowest_heartbeat:.2f} | lost {leases_lost:d}"


class Bystander:
    """Sends heartbeats of its own, beside its session's, and keeps the longest."""

    def __init__(self, address: str) -> None:
        self.slowest = 0.0
        self._lease = RemoteServer(address, links=False).join(60.0)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, args=(address,), daemon=True)
        self._thread.start()

    def _beat(self, address: str) -> None:
        with open_channel(address) as channel:
            heartbeat = rpc.ClientsStub(channel).Heartbeat
            while not self._ended.wait(BEAT_SECONDS):
                began = time.monotonic()
                with contextlib.suppress(LoraServerError):
                    self._lease.calls.sign(request := pb.HeartbeatRequest())
                    call(heartbeat, request, server=address, seconds=60.0)
                self.slowest = max(self.slowest, time.monotonic() - began)

    def lost(self) -> bool:
        try:
            self._lease.check()
            self._lease.acquire([])
        except LoraServerError:
            return True
        return False

    def close(self) -> None:
        self._ended.set()
        self._thread.join(60)
        self._lease.leave()


@contextlib.contextmanager
def stubs(address: str, kind: Any) -> Iterator[list[Any]]:
    """Make stubs of a service, each on a connection of its own."""
    own = (("grpc.use_local_subchannel_pool", 1),)
    with contextlib.ExitStack() as stack:
        yield [kind(stack.enter_context(grpc.insecure_channel(address, own))) for _ in range(CONNECTIONS)]


def outcomes(calls: Sequence[Any], address: str) -> Counter[str]:
    """Count the calls by their outcome: `ok`, or the code of the error."""
    found: Counter[str] = Counter()
    for one in calls:
        error = one.exception(PATIENCE)
        found["ok" if error is None else translate(error, address).code] += 1
    return found


def add_many(address: str, source: str, count: int) -> Counter[str]:
    """Add one source `count` times at once, under different names; return the counts of outcomes."""
    with stubs(address, rpc.AdaptersStub) as each:
        requests = [pb.AddAdapterRequest(name=f"a{n}", uri=source, wait_seconds=PATIENCE) for n in range(count)]
        calls = [each[n % CONNECTIONS].Add.future(one, timeout=PATIENCE) for n, one in enumerate(requests)]
        return outcomes(calls, address)


def join_many(address: str, shard: int, count: int) -> Counter[str]:
    process = psutil.Process(shard)
    with stubs(address, rpc.ClientsStub) as each:
        os.kill(process.pid, signal.SIGSTOP)
        try:
            request = pb.JoinRequest(instance="flood")
            calls = [each[n % CONNECTIONS].Join.future(request, timeout=PATIENCE) for n in range(count)]
            time.sleep(STOPPED_SECONDS)
        finally:
            os.kill(process.pid, signal.SIGCONT)
        return outcomes(calls, address)


def beside(count: int, address: str, flood: Callable[[], Counter[str]]) -> dict[str, Any]:
    """Run a flood while `count` clients do nothing but keep their leases; return what both saw."""
    bystanders = [Bystander(address) for _ in range(count)]
    began = time.monotonic()
    found = flood()
    spent, lost = time.monotonic() - began, sum(one.lost() for one in bystanders)
    slowest = max(one.slowest for one in bystanders)
    for one in bystanders:
        one.close()
    return {**found, "seconds": spent, "slowest_heartbeat": slowest, "leases_lost": lost}


def main() -> None:
    given, rows = harness.flags(__doc__, adds=1000, joins=100, bystanders=10), []
    with harness.scratch() as root:
        model = harness.make(root, "mixtral", {})
        tiny.make_adapter(model, root / "law", lora_rank=4, seed=1, targets="all")
        flags = ["--base-model", str(root / "base"), "--layout", "ep1-pp2", "--adapter-root", str(root)]
        with running_server(root / "log", flags) as server:
            shard = harness.status(server.address).shards[0].pid
            floods = {
                f"{given.adds} adds": partial(add_many, server.address, str(root / "law"), given.adds),
                f"{given.joins} joins, a shard stopped for {STOPPED_SECONDS:g} s": partial(
                    join_many, server.address, shard, given.joins
                ),
            }
            for name, flood in floods.items():
                rows.append({"flood": name, **beside(given.bystanders, server.address, flood)})
                print(rows[-1], file=sys.stderr, flush=True)
    title = f"Beside {given.bystanders} clients"
    harness.show(given, rows, harness.table(title, rows, COLUMNS))


if __name__ == "__main__":
    main()
