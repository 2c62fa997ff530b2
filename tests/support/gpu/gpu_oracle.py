"""What the kernel decided, decided again by the Python loop's rule and checks: same order, same refusals."""

from __future__ import annotations

from types import SimpleNamespace

from lora_server.shard.schedule import FairShare, PendingStep
from lora_server.transport.gpu.layout import NoteKind, Refusal
from tests.support.gpu.gpu_weights import reference

PROTOCOL = {*range(Refusal.BAD_HEADER, Refusal.BAD_MAP + 1), Refusal.BAD_WIRE, Refusal.BAD_SCALE}


def replay(
    notes: list[tuple[int, int, int, int]],
    log: dict[tuple[int, int, int], bytes],
    client_of: dict[int, int],
    share: int,
    in_codes: bool = False,
) -> int:
    """How many steps were ordered; raises AssertionError at the first decision that is another."""
    rule, pending, epochs, ordered, tickets = FairShare(), dict[int, PendingStep](), dict[int, int](), 0, 0
    rule._now, connections = share, dict[int, SimpleNamespace]()
    for kind, link, seq, what in notes:
        client = client_of.get(link, 0)
        if kind == NoteKind.STARTED:
            pending.clear()
        elif kind == NoteKind.CHANGED:
            pending.pop(link, None)
            epochs[link] = what
            connections[link] = SimpleNamespace(client=client, epoch=what, finish=0)
        elif kind == NoteKind.TAKEN:
            memory = log[client, epochs[link], seq]
            header, _ = reference(in_codes).check(memory, client, epochs[link] & 0xFFFFFFFF, seq)
            assert (what == Refusal.NOTHING_WRONG) == (header is not None), (Refusal(what), header)
            if header is not None:
                tickets += 1
                assert link not in pending, "a client's oldest step is taken once"
                pending[link] = PendingStep(connections[link], seq, header, tickets, 0)
        elif kind == NoteKind.READY:
            assert pending[link].blocked
            pending[link].pin = 0
        elif kind == NoteKind.ORDERED:
            picked = rule.pick(pending.values())
            assert picked is pending[link] and picked.seq == seq, f"link {link} seq {seq} was not next"
            _, request = reference(in_codes).check(
                log[client, epochs[link], seq], client, epochs[link] & 0xFFFFFFFF, seq
            )
            assert (what in PROTOCOL) == (request is None), (Refusal(what), request)
            if what == Refusal.NOTHING_WRONG:
                del pending[link]
                ordered += 1
        elif kind == NoteKind.REFUSED:
            step = pending.pop(link, None)
            assert what != Refusal.TOO_LATE or (step is not None and step.blocked)
    return ordered
