"""A controller without sockets, and what shards and clients tell it."""

from __future__ import annotations

import threading

from lora_server import spec
from lora_server.control.adapters.registry import Record
from lora_server.control.controller import Controller
from lora_server.control.members.agreement import Agreement
from lora_server.daemon.kept import Kept
from lora_server.placement import Layout
from lora_server.spec import Invocation, Site
from lora_server.wire import lora_server_pb2 as pb

SPEC = spec.load("mixtral-8x7b")


def make_controller(layout="ep1-pp1", settled=True, restarted=True, most_active=0):
    agreement = Agreement(SPEC, Layout.parse(layout), "float32", "independent", 64)
    controller = Controller(agreement, restarted=restarted, max_active_adapters=most_active)
    if settled:
        controller.arrivals.settled.set()
    return controller


def kept(name, handle, version="v1", listed=True, pinned=False):
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
    )
    encoded = record.encode()
    return pb.Load(handle=handle, path="/x", version=version, record=encoded, listed=listed, pinned=pinned)


def registration(shard, pid=1, **fields):
    fields = {"instance": str(pid), "agreement": make_controller("ep2-pp1").agreement.digest()} | fields
    return pb.Registration(shard=shard, pid=pid, **fields)


class ToldShard:
    """What a shard process keeps for its controller, and answers it, no weights; `failure` answers loads and pins."""

    def __init__(self, controller, memory=None, **fields):
        self.memory, self.failure, self.controller = memory or Kept(), "", controller
        own = self.memory.sign(registration(0, agreement=controller.agreement.digest(), **fields))
        reports = [report.kept for report in self.memory.reports(lambda handle: 0)]
        self.handle = controller.arrivals.arrive(own, reports)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self):
        for command in self.handle.commands():
            self.memory.note(command)
            kind = command.WhichOneof("command")
            fails = kind in ("load", "pin") and self.failure
            if kind == "load" and not fails:
                all_of_it = pb.Residency(handle=command.load.handle, layers=self.controller.agreement.spec.layers)
                self.controller.adapters.on_moved(0, [all_of_it])
            self.handle.finish(pb.Done(command=command.id, code="adapter_load" if fails else "", message=self.failure))

    def lives(self):
        """As a report of its counters says."""
        self.controller.shards.update(self.handle, pb.ShardStats())

    def close(self):
        """Its stream ends, once it has everything."""
        self.handle.close()
        self._thread.join(10)
        assert not self._thread.is_alive()
