"""State of a running server."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING, Annotated

import typer

from lora_server.cli.call import DEFAULT_SERVER, JsonOption, ServerOption, ask_status, one_line_errors, print_json
from lora_server.units import count, size
from lora_server.wire.plain import fields

if TYPE_CHECKING:
    from rich.console import Console

    from lora_server.wire import lora_server_pb2 as pb

WORK = ("shard", "stage", "ep", "state", "node", "pid", "restarts", "steps", "failed")
MEMORY = ("shard", "device", "weights", "free", "clients")
CLIENTS = ("client", "instance", "by", "heard", "holds")
LEFT = ("state", "device", "clients", "instance", "by")
MOST_NAMES = 8  # of what a client holds; --json has a hundred


@one_line_errors()
def status(
    server: ServerOption = DEFAULT_SERVER,
    as_json: JsonOption = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Refresh when something happens, and every second, until Ctrl-C.")
    ] = False,
) -> None:
    """Show shards, memory, clients and adapters of a running server."""
    if watch:
        from lora_server.cli import live

        live.watch(server, as_json, show)
        return
    from lora_server import terminal

    reply = ask_status(server)
    if as_json:
        print_json(fields(reply))
    else:
        show(reply, terminal.open_console())


def show(reply: pb.StatusReply, console: Console) -> None:
    """Print the reply for people."""
    from lora_server import terminal

    layout = f"{reply.layout}, {reply.replicas} replicas" if reply.replicas > 1 else reply.layout
    what = f"{reply.model} {layout}; adapters: {count(reply.adapters)}, clients: {count(reply.clients)}"
    terminal.say(console, what, "ready" if reply.ready else "not ready")
    if reply.leader_epoch:
        terminal.say(console, f"epoch {reply.leader_epoch}, pid {reply.pid}; another controller stands by", "leader")
    if reply.queued:
        text = f"{count(reply.queued)} requests wait for a place; adapters in use: {count(reply.active)}"
        terminal.say(console, text, "queued")
    for row in reply.loading:
        left = f"{row.expected_us * 1e-6:.1f} s left" if row.HasField("expected_us") else "no estimate yet"
        terminal.say(console, f"{row.name}: {count(row.requests)} requests wait for it, {left}", "loading")
    for one in reply.draining:
        holders = f"held by client {', '.join(map(str, one.clients[:MOST_NAMES]))}"
        if one.merged_in:
            merged_in = ", ".join(map(str, one.merged_in[:MOST_NAMES]))
            holders += f", in the base weights of client {merged_in}, which keeps it until its restart on a new merge"
        now = f"{one.serves[:12]} serves" if one.serves else "it was removed"
        terminal.say(console, f"{one.name} {one.version[:12]}: {holders}; {now}", "draining")
    for each in reply.slo_classes:
        terminal.say(console, f"{each.slo}; requests that wait for a place: {count(each.queued)}", f"class {each.name}")
    if reply.resize.state:
        how = f"{reply.resize.state}, {count(reply.resize.done)} of {count(reply.resize.total)}"
        terminal.say(console, f"to {reply.resize.layout}: {how}", "resizing")
    if reply.degraded:
        terminal.say(console, reply.degraded, "degraded")
    if reply.reason:
        terminal.say(console, reply.reason, "reason")
    for refused in reply.refused:
        terminal.say(console, f"{refused.name}: {refused.reason}", "refused")
    if (more := reply.num_refused - len(reply.refused)) > 0:
        terminal.say(console, f"{count(more)} more: see lora-server adapters list", "refused")
    if reply.warned:
        text = f"{count(reply.warned)} adapters are served with one: see lora-server adapters list"
        terminal.say(console, text, "warning")
    _table(console, WORK, [_work(shard) for shard in reply.shards], "state")
    _table(console, MEMORY, [_memory(shard) for shard in reply.shards], "device")
    if reply.joined:
        _table(console, CLIENTS, [_client(client) for client in reply.joined], "instance")
        for client in reply.joined:
            slo_class = f"class {client.slo_class}; " if client.slo_class else ""
            terminal.say(console, slo_class + _held(client), f"client {client.client}")
        if (more := reply.clients - len(reply.joined)) > 0:
            terminal.say(console, f"{count(more)} more clients")


def _table(console: Console, columns: tuple[str, ...], rows: list[list[str]], wrapped: str) -> None:
    from lora_server import terminal

    console.print()
    terminal.table(console, columns, rows, left=LEFT, wrapped=wrapped)


def _work(row: pb.ShardStatus) -> list[str]:
    numbers = row.restarts, row.stats.steps, row.stats.failed
    place = [str(number) for number in (row.shard, row.stage, row.ep_rank)]
    known = bool(row.pid or row.lost_since)
    since = time.strftime(" since %H:%M", time.localtime(row.lost_since)) if row.lost_since else ""
    return [*place, row.state + since, str(row.node) if known else "-", str(row.pid or "-"), *map(count, numbers)]


def _memory(row: pb.ShardStatus) -> list[str]:
    stats = row.stats
    if not stats.device:  # it has not reported yet
        return [str(row.shard), "-", "-", "-", "-"]
    transports = Counter(one.transport for one in stats.attached)
    attached = ", ".join(f"{count(number)} {name}" for name, number in sorted(transports.items()))
    free = f"{size(stats.free_bytes)} of {size(stats.total_bytes)}"
    return [str(row.shard), stats.device, size(stats.weight_bytes), free, attached or "-"]


def _client(client: pb.ClientStatus) -> list[str]:
    by, heard = ", ".join(client.transports), f"{client.silent_seconds:.0f} s ago"
    return [str(client.client), client.instance, by or "-", heard, count(client.held)]


def _held(client: pb.ClientStatus) -> str:
    names, more = client.adapters[:MOST_NAMES], client.held - MOST_NAMES
    return ", ".join([*names, f"and {count(more)} more"] if more > 0 else names) or "holds no adapter"
