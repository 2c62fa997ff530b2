"""State that a shard keeps for its next controller: adapters that it was told of, its clients, and its claim.

Not thread-safe except `end`: the thread of the controller's stream uses it.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator

from lora_server.wire import bounds
from lora_server.wire import lora_server_pb2 as pb

MOST_GONE, MOST_ACTIVE = (bounds.BOUNDS[f"Registration.{name}"].items for name in ("gone", "active"))


class Kept:
    """The kept state of one shard process. `instance` is the process's secret id, known to its controller only."""

    def __init__(self) -> None:
        self.instance = secrets.token_hex(16)
        self.claim = pb.Claim()
        self.loads: dict[int, pb.Load] = {}
        self.grants: dict[int, pb.Grant] = {}
        self.ended: dict[int, int] = {}  # clients that disconnected, and their epochs, until they are revoked
        self.gone: dict[int, None] = {}  # handles that were dropped, the last MOST_GONE of them
        self.active: set[int] = set()  # handles that clients hold
        self.refused: pb.Refusals | None = None  # start-up adapters that are not served
        self.last_handle = self.last_client = 0

    def note(self, command: pb.ShardCommand) -> None:
        """Update the state by a command that is being carried out."""
        kind = command.WhichOneof("command")
        if kind == "claim":
            self.claim = pb.Claim(
                epoch=command.claim.epoch,
                run=command.claim.run or self.claim.run,
                registered=command.claim.registered if command.claim.run else self.claim.registered,
                restarts=command.claim.restarts,
                generation=command.claim.generation,
            )
        elif kind == "load":
            self.loads[command.load.handle] = command.load
            self.last_handle = max(self.last_handle, command.load.handle)
        elif kind == "note":
            self.loads[command.note.handle] = command.note
            self.last_handle = max(self.last_handle, command.note.handle)
        elif kind == "drop":
            self.loads.pop(command.drop, None)
            self.gone[command.drop] = None
            if len(self.gone) > MOST_GONE:
                del self.gone[next(iter(self.gone))]
            self.active.discard(command.drop)
        elif kind == "uses" and command.uses.HasField("active"):
            active = command.uses.active
            self.active = (set() if active.anew else self.active - set(active.fewer)) | set(active.more)
        elif kind == "refused":
            self.refused = command.refused
        elif kind == "grant":
            self.grants[command.grant.client] = command.grant
            self.last_client = max(self.last_client, command.grant.client)
        elif kind == "revoke":
            self.grants.pop(command.revoke, None)
            self.ended.pop(command.revoke, None)

    def end(self, gone: pb.ClientGone) -> None:
        """Record that a client's connection ended. May be called from any thread."""
        grant = self.grants.get(gone.client)
        if grant is not None and grant.epoch == gone.epoch:
            self.ended[gone.client] = gone.epoch

    def is_foreign(self, claim: pb.Claim) -> bool:
        """Return whether the state belongs to another run than the controller's claim."""
        return bool(self.claim.run and claim.run and claim.run != self.claim.run)

    def forget(self) -> tuple[list[int], list[int]]:
        """Drop the state of a run that is over; return its handles and clients."""
        gone = list(self.loads), list(self.grants)
        self.loads, self.grants, self.gone, self.refused, self.claim = {}, {}, {}, None, pb.Claim()
        self.active, self.ended = set(), {}
        self.last_handle = self.last_client = 0
        return gone

    def sign(self, registration: pb.Registration) -> pb.Registration:
        """Fill in this process's instance, claim, run and counts in a registration, and return it."""
        registration.instance, registration.epoch = self.instance, self.claim.epoch
        registration.run, registration.registered = self.claim.run, self.claim.registered
        registration.restarts, registration.kept = self.claim.restarts, self.count()
        registration.generation = self.claim.generation or registration.generation
        registration.last_handle, registration.last_client = self.last_handle, self.last_client
        registration.gone.extend(sorted(self.gone))
        registration.active.extend(sorted(self.active)[:MOST_ACTIVE])
        if self.refused is not None:
            registration.refused.CopyFrom(self.refused)
        return registration

    def count(self) -> int:
        """Return how many of the `reports` are about kept adapters and clients."""
        return len(self.loads) + len(self.grants)

    def reports(self, layers_ready: Callable[[int], int]) -> Iterator[pb.ShardReport]:
        """Yield the reports that follow a registration: kept adapters, kept clients, then clients that are gone."""
        for handle, load in self.loads.items():
            yield pb.ShardReport(kept=pb.Kept(load=load, layers=layers_ready(handle)))
        for grant in self.grants.values():
            yield pb.ShardReport(kept=pb.Kept(grant=grant))
        for client, epoch in list(self.ended.items()):  # the earlier controller may not have got these reports
            yield pb.ShardReport(client_gone=pb.ClientGone(client=client, epoch=epoch))
