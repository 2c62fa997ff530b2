"""A server's status: its shards, the clients that joined, the adapters that it refused."""

from __future__ import annotations

import math
import os
import time
from collections import Counter

from lora_server import __version__
from lora_server.control.adapters.catalog import name_of
from lora_server.control.admission.service import AdmissionService
from lora_server.control.controller import Controller
from lora_server.control.reports.listing import refusal
from lora_server.wire import lora_server_pb2 as pb

MOST_REFUSED = 100  # the list of adapters has all of them
MOST_LOADING = 100
MOST_JOINED, MOST_HELD = 1000, 100  # clients, and names of each
MOST_DRAINING = 100  # versions, and clients of each


def status(controller: Controller) -> pb.StatusReply:
    """Return the whole status as it is now."""
    adapters = controller.adapters
    down, layout = controller.degraded, controller.agreement.layout
    reason, refused, queue = controller.not_ready(), adapters.catalog.refusals.listed(), adapters.admission.queue
    return pb.StatusReply(
        version=__version__,
        now=time.time(),
        model=controller.agreement.spec.name,
        layout=str(layout),
        generation=controller.agreement.generation,
        replicas=layout.replicas,
        degraded=f"shards {down} are down; their twins serve" if down else "",
        ready=not reason,
        reason=reason,
        refused=[refusal(one) for one in refused[:MOST_REFUSED]],
        num_refused=len(refused),
        warned=adapters.listings.num_warned,
        clients=len(controller.clients.leases),
        adapters=len(adapters.catalog.records()),
        active=len(queue.capacity.active),
        queued=len(queue.tickets.waiting),
        num_loading=len(queue.tickets.loading),
        loading=_loading(controller),
        pid=os.getpid(),
        leader_epoch=controller.start.leader_epoch,
        run=controller.arrivals.run,
        shards=_shards(controller),
        joined=_joined(controller),
        slo_classes=_slo_classes(adapters.admission),
        draining=_draining(controller),
        resize=controller.resize.status(),
    )


def _loading(controller: Controller) -> list[pb.LoadingStatus]:
    adapters, rows = controller.adapters, []
    tickets = list(adapters.admission.queue.tickets.loading.values())
    requests = Counter(handle for ticket in tickets for handle in ticket.handles or ())
    left = {handle: adapters.sync.residency.seconds_left(handle) for handle in requests}
    for handle in sorted(requests, key=left.__getitem__)[:MOST_LOADING]:
        if left[handle] and (name := name_of(adapters.catalog, handle)) is not None:
            row = pb.LoadingStatus(name=name, requests=requests[handle])
            if left[handle] < math.inf:
                row.expected_us = int(left[handle] * 1e6)
            rows.append(row)
    return rows


def _draining(controller: Controller) -> list[pb.DrainingStatus]:
    catalog, holds = controller.adapters.catalog, controller.adapters.admission.holds
    leases = controller.clients.leases
    rows: list[pb.DrainingStatus] = []
    for handle in catalog.marks.pinned_and_draining()[1]:
        record, clients = catalog.by_handle(handle), sorted(holds.by_client(handle))
        if record is not None and clients and len(rows) < MOST_DRAINING:
            serves = catalog.find(record.name)
            row = pb.DrainingStatus(name=record.name, version=record.version, clients=clients[:MOST_DRAINING])
            row.serves = "" if serves is None else serves.version
            row.merged_in.extend(sorted(leases.merged_in(record.version).intersection(clients))[:MOST_DRAINING])
            rows.append(row)
    return rows


def _slo_classes(admission: AdmissionService) -> list[pb.SloClassStatus]:
    queued = admission.queue.tickets.waiting.by_class
    known = admission.classes.known.classes
    return [pb.SloClassStatus(name=one.name, slo=str(one.slo), queued=queued[one.name]) for one in known]


def _shards(controller: Controller) -> list[pb.ShardStatus]:
    layout, rows = controller.agreement.layout, []
    live, missing, lost = controller.shards.live(), set(controller.shards.missing()), controller.shards.lost()
    for shard, rank in controller.shards.ranks.items():
        row = pb.ShardStatus(shard=shard, stage=layout.stage(shard), ep_rank=layout.ep_rank(shard))
        row.replica = shard // layout.width
        row.state = "starting" if shard in missing else "up"
        row.restarts = max(0, rank.restarts)
        if shard in live:
            row.node, row.pid = live[shard].node, live[shard].registration.pid
            row.stats.CopyFrom(live[shard].stats)
        if shard in lost:
            row.state, row.node, row.lost_since = "lost", lost[shard][0].node, lost[shard][1]
        rows.append(row)
    return rows


def _joined(controller: Controller) -> list[pb.ClientStatus]:
    transports: dict[int, set[str]] = {}
    for handle in controller.shards.live().values():
        for one in handle.stats.attached:
            transports.setdefault(one.client, set()).add(one.transport)
    joined = []
    for lease, silence in controller.clients.leases.silences()[:MOST_JOINED]:
        held = controller.adapters.listings.held(lease.client)
        row = pb.ClientStatus(client=lease.client, instance=lease.instance, silent_seconds=silence, held=len(held))
        row.slo_class = lease.engine.slo_class
        row.adapters.extend(held[:MOST_HELD])
        row.transports.extend(sorted(transports.get(lease.client, ())))
        joined.append(row)
    return joined
