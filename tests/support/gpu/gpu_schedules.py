"""One seeded schedule: a shard's kernel, its clients' and its host's doings, in an order that a seed chooses."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterable, Mapping
from types import SimpleNamespace

import torch

from kernels_cuda.residency import LANES
from lora_server.device.protocol.codes import CommandKind, NoteKind, Refusal
from lora_server.shard import schedule
from lora_server.shard.schedule import NOT_READY, PendingStep, TenantShare
from lora_server.transport.base import Grant
from lora_server.wire import slot
from tests.support.gpu.gpu_clients import Client, GpuClient, WildClient
from tests.support.gpu.gpu_shard import HANDLES, LINKS, Shard, Waiting
from tests.support.gpu.gpu_weights import VARIANTS, reference
from tests.support.gpu.gpu_world import World

QUANTUM, MOST_QUANTA = 40, 60_000
PROTOCOL = {*range(Refusal.BAD_HEADER, Refusal.BAD_MAP + 1), Refusal.BAD_WIRE, Refusal.BAD_SCALE}
Note = tuple[int, int, int, int]  # kind, link, seq, what


def replay(
    notes: list[Note], log: dict[tuple[int, int, int], bytes], clients: Mapping[int, Client], share: int = 0,
    in_codes: bool = False,
) -> int:  # fmt: skip
    """Decide again, by the Python loop's rule and checks, what the kernel decided: same order, same refusals.

    `clients`: by link. `share`: where the first tenant's began. Returns how many steps were ordered; raises
    AssertionError at the first decision that differs.
    """
    rule, pending, connections, ordered, tickets = TenantShare(), dict[int, PendingStep](), {}, 0, 0
    rule._tenants["0"] = first = schedule._Tenant()
    first.clients._now = share

    def checked(link: int, seq: int) -> tuple[object, object]:
        """Header and request, as far as they are sound."""
        client, epoch = clients[link].id, connections[link].grant.epoch
        return reference(in_codes).check(log[client, epoch, seq], client, epoch & 0xFFFFFFFF, seq)

    for kind, link, seq, what in notes:
        if kind == NoteKind.STARTED:
            pending.clear()
        elif kind == NoteKind.CHANGED:
            pending.pop(link, None)
            if (its := clients.get(link)) is not None:
                grant = Grant(link, what, b"", str(its.tenant), its.weight)
                connections[link] = SimpleNamespace(grant=grant, finish=0)
        elif kind == NoteKind.TAKEN:
            header, _ = checked(link, seq)
            assert (what == Refusal.NOTHING_WRONG) == (header is not None), (Refusal(what), header)
            if header is not None:
                tickets += 1
                assert link not in pending, "a client's oldest step is taken once"
                pending[link] = PendingStep(connections[link], seq, header, tickets, 0)
        elif kind == NoteKind.READY:
            step = pending[link]
            assert step.blocked
            has_deadline = clients[link].step_us and step.header.step_class == slot.DECODE
            assert bool(what) == bool(has_deadline), "a decode step of a class has a deadline, and no other"
            step.pin, step.share = 0, NOT_READY._replace(start_by_ns=what)
        elif kind == NoteKind.ORDERED:
            picked = rule.pick(pending)
            assert picked is pending[link] and picked.seq == seq, f"link {link} seq {seq} was not next"
            _, request = checked(link, seq)
            assert (what in PROTOCOL) == (request is None), (Refusal(what), request)
            if what == Refusal.NOTHING_WRONG:
                del pending[link]
                ordered += 1
        elif kind == NoteKind.REFUSED:
            step = pending.pop(link, None)
            assert what != Refusal.NOT_LOADED or (step is not None and step.blocked)
    return ordered


def give_tenants(clients: Iterable[Client], chooser: random.Random) -> None:
    """Make clients those of one or of several tenants, some of them with an SLO class. Weights are powers of two, so
    that sums of shares are exact."""
    tenants = chooser.choice([1, 1, 1, 1, 2, 3])
    for client in clients:
        client.tenant = chooser.randrange(tenants)
        client.weight = (1.0, 4.0, 0.5)[client.tenant]
        client.step_us = chooser.choice([0, 1, 50])


def adapters(shard: Shard, rounds: int) -> Waiting:
    """Load, drop and load adapters again while steps name them."""
    shard.never = shard.begin(HANDLES, 0)
    for index in range(HANDLES - 1):
        shard.finish(shard.begin(index, shard.random.randrange(len(VARIANTS))))
    for _ in range(rounds):
        for _ in range(shard.random.randrange(30)):
            yield
        index = shard.random.randrange(HANDLES)
        if shard.known[index]:
            yield from shard.drop(index)
        for _ in range(shard.random.randrange(3)):
            yield
        handle = shard.begin(index, shard.random.randrange(len(VARIANTS)))
        for _ in range(shard.random.randrange(12)):
            yield
        shard.finish(handle)


def drain(shard: Shard) -> Waiting:
    """Drain the shard towards the end: clients that still push are refused."""
    for _ in range(shard.random.randrange(200, 900)):
        yield
    shard.draining = True
    yield from shard.post(CommandKind.DRAIN)


def restarts(shard: Shard, times: int) -> Waiting:
    """The kernel is asked to leave, and launched again by `pump`."""
    for _ in range(times):
        for _ in range(shard.random.randrange(200)):
            yield
        yield from shard.post(CommandKind.STOP)


def drive(world: World, shard: Shard, working: list[Waiting], others: list[Waiting], chooser: random.Random) -> int:
    """Run until all actors are through; return how many quanta that took."""
    for quantum in range(MOST_QUANTA):
        world.run(chooser.randint(1, QUANTUM))
        if shard.launches:
            shard.pump()
        for group in (working, others):
            for actor in list(group):
                if chooser.random() < 0.7 and next(actor, group) is group:
                    group.remove(actor)
        if not working and not others:
            return quantum
    raise AssertionError(f"not over after {MOST_QUANTA} quanta")


def play(seed: int, library: ctypes.CDLL, steps: int = 4) -> dict[str, int]:
    """Raises AssertionError for anything that must not be; the seed says it again."""
    chooser = random.Random(seed)
    torch.manual_seed(seed)
    world = World(seed, library, network=chooser.random() < 0.7)
    rounds = random.Random(~seed)  # of the poller
    links = rounds.sample(range(LANES * rounds.choice([1, 1, 2, 3])), LINKS)
    shard = Shard(world, chooser, idle_ns=3_000, links=links)
    shard.steady = chooser.random() < 0.5
    if shard.steady:
        shard.serve["idle_ns"] = 50_000_000
    shard.serve["tickets"] = chooser.choice([0, chooser.randrange(0x7FFFFFF4, 0x7FFFFFFF)])
    shard.tenants[0]["share"] = share = chooser.choice([0, 2**40])
    shard.launch()
    log = dict[tuple[int, int, int], bytes]()
    clients: list[Client] = [GpuClient(world, shard, i, log) for i in range(chooser.randint(1, 3))]
    clients.append(WildClient(world, shard, len(clients), log))
    give_tenants(clients, rounds)
    if chooser.random() < 0.5:
        shard.foreign = (clients[-1].link, chooser.randrange(HANDLES))
    working: list[Waiting] = [client.run(steps) for client in clients]
    others = [adapters(shard, 2), restarts(shard, 0 if shard.steady else chooser.randrange(2))]
    if chooser.random() < 0.2:
        others.append(drain(shard))
    quanta = drive(world, shard, working, others, chooser)
    for _ in range(3):
        world.run(QUANTUM)
        shard.pump()
    ordered = replay(shard.notes, log, {client.link: client for client in clients}, share, library.in_codes)
    used, turn = int(shard.used.max()), int(shard.serve["turn"])
    assert turn <= used <= turn + 1, "the newest turn used something; the next one may have been refused"
    found = {"steps": ordered, "launches": shard.launches, "answers": sum(client.answered for client in clients)}
    return found | {"turns": int(shard.mailbox["turn"]), "quanta": quanta, "ns": world.now}
