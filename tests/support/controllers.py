"""Controllers without sockets, and shards that answer them."""

import contextlib
import math
import threading
from collections.abc import Sequence

from lora_server import spec
from lora_server.control.adapters.records import Record
from lora_server.control.controller import Controller
from lora_server.control.members.agreement import Agreement
from lora_server.control.rpc.registration import Doorkeeper
from lora_server.control.rpc.server import ControlServer
from lora_server.daemon.kept import Kept
from lora_server.placement import Layout
from lora_server.spec import Invocation, Site
from lora_server.timings import DEFAULTS, Timings
from lora_server.wire import lora_server_pb2 as pb
from tests.support.serving import HANG_SECONDS
from tests.support.workload import spec_of

SPEC = spec.load("mixtral-8x7b")


def make_controller(layout="ep1-pp1", settled=True, restarted=True, most_active=0, replicas=1, **more):
    agreement = Agreement(SPEC, Layout.parse(layout, replicas), "float32", "independent", 64)
    controller = Controller(agreement, restarted=restarted, max_active_adapters=most_active, **more)
    if settled:
        controller.start.settled.set()
    return controller


def make_tiny_controller(**settings):
    """Make a controller of tiny-mixtral with one shard and adapters that have files."""
    agreement = Agreement(spec_of("mixtral"), Layout(1, 1), "float32", "independent", 64)
    return Controller(agreement, **settings)


def kept(name, handle, version="v1", listed=True, pinned=False, outline=""):
    """An adapter as a shard keeps it."""
    record = Record(
        handle=handle,
        name=name,
        version=version,
        path="/x",
        stamp="",
        lora_rank=4,
        nbytes=1,
        sites=(Site(0, "qkv"),),
        warnings=("careful",),
        invocation=Invocation((1, 2)),
        pinned=pinned,
        outline=outline,
    )
    encoded = record.encode()
    return pb.Load(handle=handle, path="/x", version=version, record=encoded, listed=listed, pinned=pinned)


def registration(shard, pid=1, **fields):
    fields = {"instance": str(pid), "agreement_digest": make_controller("ep2-pp1").agreement.digest()} | fields
    return pb.Registration(shard=shard, pid=pid, **fields)


def moved(controller, handle, residencies):
    """A shard reports what it has."""
    report = pb.ShardReport(residencies=pb.Residencies(moved=residencies))
    controller.hear(handle, report)


def drained(handle):
    """End the stream of a shard's commands; return those that it was sent until now."""
    handle.commands.close()
    return list(handle.commands)


class ToldShard:
    """A shard process without weights; `failure` is its answer to loads and pins, `loaded` what it was told to load."""

    def __init__(self, controller, memory=None, shard=0, **fields):
        self.memory, self.failure, self.controller = memory or Kept(), "", controller
        self.largest = 0  # bytes of a command
        self.loaded = set()
        fields = {"agreement_digest": controller.agreement.digest()} | fields
        own = self.memory.sign(registration(shard, **fields))
        reports = [report.kept for report in self.memory.reports(lambda handle: 0)]
        self.handle = controller.arrivals.arrive(own, reports)
        self.lives()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self):
        for command in self.handle.commands:
            self.memory.note(command)
            self.largest = max(self.largest, command.ByteSize())
            kind = command.WhichOneof("command")
            fails = kind in ("load", "pin") and self.failure
            if kind == "load" and not fails:
                self.loaded.add(command.load.handle)
                all_of_it = pb.Residency(handle=command.load.handle, layers=self.controller.agreement.spec.layers)
                moved(self.controller, self.handle, [all_of_it])
            done = pb.Done(command=command.id, code="adapter_load" if fails else "", message=self.failure)
            self.controller.hear(self.handle, pb.ShardReport(done=done))

    def lives(self):
        """Report its counters, for good: a test that is slow is not taken for a shard that is silent."""
        self.controller.shards.update(self.handle, pb.ShardStats())
        self.handle.heard = math.inf

    def close(self):
        """End its stream, once all commands have been read."""
        self.handle.commands.close()
        self._thread.join(HANG_SECONDS)
        assert not self._thread.is_alive()


class PlacedServer:
    """`names` are its adapters, of which `places` are active at a time; `handles` are theirs."""

    def __init__(
        self, stack: contextlib.ExitStack, names: Sequence[str], places: int, timings: Timings = DEFAULTS
    ) -> None:
        self.controller = make_controller(settled=False, most_active=places, timings=timings)
        self.shard = ToldShard(self.controller)
        self.handles = {name: handle for handle, name in enumerate(names, start=70_000)}
        sizes = self.controller.adapters.sync.sizes
        for name, handle in self.handles.items():
            self.controller.adapters.catalog.publish(Record.decode(kept(name, handle).record))
            sizes.set_size(handle, 0, 1)
        self.shard.handle.registration.pool_bytes = 1 << 20
        sizes.set_capacity(0, 1 << 20)
        control = ControlServer(self.controller, "127.0.0.1:0", Doorkeeper(""))
        stack.callback(lambda: control.close(0.2))
        stack.callback(self.shard.close)
        self.address = f"127.0.0.1:{control.port}"

    def held(self) -> dict[int, int]:
        """Return how often clients hold what."""
        holds = self.controller.adapters.admission.holds
        return {handle: holds.by_client(handle).total() for handle in holds.handles()}

    def report(self, seconds: dict[str, float]) -> None:
        """Have the shard report how long it still loads these adapters; 0: they are loaded."""
        layers = self.controller.agreement.spec.layers
        reports = [
            pb.Residency(handle=self.handles[name], layers=0 if left else layers, expected_us=round(left * 1e6))
            for name, left in seconds.items()
        ]
        moved(self.controller, self.shard.handle, reports)
