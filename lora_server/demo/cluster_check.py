"""What an engine on this machine would meet at a server: `lora-server doctor --cluster`.

It joins as an engine does, connects to every shard over TCP, and pushes steps to each with an adapter that is there.
A step's time on the network is what passed here between push and answer, less what passed at the shard between request
and answer, each by its own clock.
"""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from client_connector.client import Client
from client_connector.directory import AdapterDirectory
from client_connector.exchange import StepTimes
from client_connector.packing import Activations, HostPacker
from client_connector.remote import RemoteServer
from client_connector.routing import Batch, Message, Run, route_dense, route_experts
from lora_server import __version__
from lora_server.address import Address
from lora_server.doctor import Finding
from lora_server.doctor.machine import failed, ok, warning
from lora_server.errors import LoraServerError, ServerUnavailableError
from lora_server.spec import PROJECTIONS, Site
from lora_server.transport.address import parse
from lora_server.wire import lora_server_pb2 as pb
from lora_server.wire.slot import ELEMENT_BYTES
from lora_server.wire.terms import Held

SECONDS = 10.0  # for the server to answer, and for a shard
SKEW_SECONDS = 1.0  # between clocks: certificates, and logs that are read together
SMALL_STEPS, LARGE_STEPS = 20, 5
MOST_ADAPTERS = 16  # that are loaded to have a step for every shard
SLOWER = 2.0  # than the median of all shards
_IP_MTU, _IPV6_MTU = 14, 24


@dataclass(frozen=True)
class ShardPath:
    """The network between this machine and a shard: one row there and back, us; bytes of large steps a second."""

    round_trip_us: float
    gb_per_s: float


def check(address: str) -> Iterator[Finding]:
    """Check a server from here. Yields what was found until a step that the others need fails."""
    directory = AdapterDirectory(address)
    try:
        asked = time.time()
        reply = directory.status()
        yield from server_findings(address, reply, asked, time.time())
        session = RemoteServer(address, links=False).join(SECONDS)
        try:
            nodes = {row.shard: row.node for row in reply.shards}
            reached = [_port(endpoint, nodes.get(endpoint.shard, 0)) for endpoint in session.endpoints]
            yield from reached
        finally:
            session.leave()
        if all(finding.state == "ok" for finding in reached):
            yield from _paths(address, directory)
    except LoraServerError as error:
        cure = "see `lora-server status`, and docs/troubleshooting.md"
        if isinstance(error, ServerUnavailableError):
            cure = "start it, or give its address by --server"
        yield failed("server", str(error), cure)
    finally:
        directory.close()


def server_findings(address: str, reply: pb.StatusReply, asked: float, answered: float) -> Iterator[Finding]:
    """Judge a status that was asked for and answered at these times of this machine's clock."""
    yield ok("server", f"{address} answers in {1e3 * (answered - asked):.1f} ms")
    if reply.version != __version__:
        yield warning("version", f"the server's is {reply.version}, this one {__version__}", "install one everywhere")
    else:
        yield ok("version", __version__)
    ahead, reach = reply.now - (asked + answered) / 2, (answered - asked) / 2
    text = f"the server's is {abs(ahead):.3f} s {'ahead' if ahead > 0 else 'behind'}, within {reach:.3f} s"
    if abs(ahead) > SKEW_SECONDS + reach:
        yield warning("clock", text, "let both hosts follow one time service (chrony, ntpd)")
    else:
        yield ok("clock", text)
    if not reply.ready:
        yield warning("server", f"not ready: {reply.reason}", "see `lora-server status`")


def _port(endpoint: pb.Endpoint, node: int) -> Finding:
    """Connect to a shard's TCP port; no lease is shown."""
    name, at = f"shard {endpoint.shard}", Address(*parse(endpoint.tcp))
    began = time.monotonic()
    try:
        with socket.create_connection((at.host, at.port), SECONDS) as sock:
            took = time.monotonic() - began
            is_6 = sock.family == socket.AF_INET6
            mtu = sock.getsockopt(socket.IPPROTO_IPV6 if is_6 else socket.IPPROTO_IP, _IPV6_MTU if is_6 else _IP_MTU)
    except OSError as error:
        cure = f"let this host reach port {at.port} of {at.host}: docs/ports.md; or start node {node} with --advertise"
        return failed(name, f"node {node} at {at}: {error}", cure)
    return ok(name, f"node {node} at {at}, connected in {1e3 * took:.1f} ms, MTU {mtu:,}")


def _paths(address: str, directory: AdapterDirectory) -> Iterator[Finding]:
    """Push to every shard, and compare."""
    serving = [one for one in directory.list() if one.state not in ("failed", "draining")]
    if not serving:
        yield warning("steps", "the server has no adapter to push steps with", "add one: lora-server adapters add")
        return
    client = Client(RemoteServer(address, "tcp"), SECONDS)
    try:
        chosen: dict[int, tuple[Held, Site]] = {}
        for one in sorted(serving, key=lambda one: one.bytes)[:MOST_ADAPTERS]:
            if len(chosen) < client.placement.layout.width:
                (held,) = client.acquire([one.name], loaded=True)
                chosen |= {shard: (held, site) for shard, site in _sites(client, held).items() if shard not in chosen}
        paths = {shard: _path(client, held, shard, site) for shard, (held, site) in sorted(chosen.items())}
    finally:
        client.close()
    for shard in sorted(set(range(client.placement.layout.width)) - set(paths)):
        yield warning(
            f"shard {shard}", "none of the smallest adapters has a part there", "look at `adapters show NAME`"
        )
    if paths:
        yield from compared(paths)


def _sites(client: Client, held: Held) -> dict[int, Site]:
    """Return a site of the adapter for every shard that has part of one."""
    placement = client.placement
    first = {}
    for shard in range(placement.layout.width):
        sites = [site for site in placement.sites(shard) if site in held.sites]
        if sites:
            first[shard] = min(sites, key=lambda site: (site.layer, PROJECTIONS.index(site.projection)))
    return first


def _path(client: Client, held: Held, shard: int, site: Site) -> ShardPath:
    small = [_step(client, held, shard, site, 1) for _ in range(SMALL_STEPS)]
    large = [_step(client, held, shard, site, client.terms.max_step_rows) for _ in range(LARGE_STEPS)]
    (trip_s, _), (time_s, nbytes) = min(small), min(large)
    return ShardPath(trip_s * 1e6, nbytes / max(time_s, 1e-6) / 1e9)


def _step(client: Client, held: Held, shard: int, site: Site, rows: int) -> tuple[float, int]:
    """Push a step of so many rows; return its seconds on the network, and its bytes both ways."""
    times: list[StepTimes] = []
    client.observe = times.append
    given = Activations(x=torch.zeros(rows, client.terms.spec.in_width(site)), decode=True)
    batch = Batch.of([Run.of(held, 0, rows)], decode=True)
    assert batch is not None
    packer, elements = HostPacker(client.terms, site, given), [given.x.numel()]
    exchange = client.start(packer, _messages(client, batch, shard, site))
    exchange.finish(lambda message, delta: elements.append(delta.numel()))
    network_ns = sum(one.arrived_ns - one.pushed_ns - (one.done_ns - one.received_ns) for one in times)
    return max(network_ns, 0) * 1e-9, sum(elements) * ELEMENT_BYTES[packer.dtype]


def _messages(client: Client, batch: Batch, shard: int, site: Site) -> list[Message]:
    """Route all rows to one shard: a dense site's, or through the first of its experts."""
    spec, most = client.terms.spec, client.terms.max_step_rows
    if spec.is_dense(site):
        return route_dense(batch, shard, most)
    first = client.placement.experts(site, shard)[0]
    chosen = torch.full((len(batch.rows_R), 1), first, dtype=torch.int64)
    owners = torch.full((spec.experts,), shard, dtype=torch.int64)
    return route_experts(batch, chosen, owners, most)


def compared(paths: Mapping[int, ShardPath]) -> Iterator[Finding]:
    """Warn of each shard with a network that is clearly slower than the others'."""
    rate = statistics.median(one.gb_per_s for one in paths.values())
    trip = statistics.median(one.round_trip_us for one in paths.values())
    for shard, path in paths.items():
        found = f"a row and back {path.round_trip_us:,.0f} us, large steps {path.gb_per_s:.2f} GB/s"
        if path.gb_per_s * SLOWER < rate or path.round_trip_us > SLOWER * trip:
            cure = f"the median shard has {trip:,.0f} us and {rate:.2f} GB/s: look at this host's link, switch and MTU"
            yield warning(f"shard {shard}", found, cure)
        else:
            yield ok(f"shard {shard}", found)
