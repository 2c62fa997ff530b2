"""The engine-neutral client: start an exchange before the engine's own GEMM, finish it after.

    exchange = client.start(packer, messages)              pushes; returns at once
    ... the engine's own GEMM ...
    exchange.finish(add)                                   add(message, delta) per message

One exchange at a time, from one thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from client_connector.exchange import Exchange, StepTimes
from client_connector.lanes import ShardLanes
from client_connector.packing import M, Packer
from client_connector.reconnect import while_away
from client_connector.routing import in_step
from client_connector.session import Server, Session
from lora_server import __version__, telemetry
from lora_server.errors import GeometryMismatchError, LoraServerError
from lora_server.wire.terms import Held, Terms

TIMEOUT_SECONDS = 30.0


class Client:
    """A joined client; `timeout_seconds` bounds a join, and a step.

    After a broken step, `recover` joins again; adapters must then be acquired again.
    """

    def __init__(
        self, server: Server, timeout_seconds: float = TIMEOUT_SECONDS, first_seconds: float | None = None
    ) -> None:
        """Join a server. `first_seconds` bounds the first join, which over nvshmem also waits for other engines."""
        self._server = server
        self.timeout_seconds = timeout_seconds
        self.observe: Callable[[StepTimes], None] | None = None
        self._adopt(server.join(timeout_seconds if first_seconds is None else first_seconds))

    def _adopt(self, session: Session) -> None:
        self.session: Session = session
        self._given_up: LoraServerError | None = None
        self._go_by_terms()

    def _go_by_terms(self) -> None:
        session = self.session
        self.terms: Terms = session.terms
        self.placement = session.terms.placement
        self.lanes = ShardLanes(session.links, session.terms.layout, session.twins)

    def step(self) -> None:
        """Begin a site's step, before it is routed: after the server was resized, go by its new placement. `end_step`
        ends it."""
        if (move := self.session.moves.take()) is not None:
            self.session.adopt(move)
            self._go_by_terms()

    def end_step(self) -> None:
        """End a site's step: its answers have come, or never will."""
        self.session.moves.end()

    @property
    def broken(self) -> LoraServerError | None:
        """The reason why no step can be started in this session; None while it is good."""
        return self.lanes.broken or self._given_up

    def give_up(self, error: LoraServerError) -> None:
        """Start no further steps in this session."""
        self._given_up = self._given_up or error

    def lost(self) -> LoraServerError | None:
        """Look for what broke the session: a failed step, a dead shard, an expired lease."""
        try:
            self.step()
            self.end_step()
            self.session.check()
            self.lanes.look()
            self.lanes.settle()
        except LoraServerError as error:
            self.give_up(error)
        return self.broken

    def deadline(self) -> float:
        """Return the deadline (time.monotonic()) of a call that begins now."""
        return time.monotonic() + self.timeout_seconds

    def recover(self, deadline: float | None = None) -> bool:
        """Join again if a step broke the session or its lease is gone; return whether it did."""
        if self.lost() is None:
            return False
        served, deadline = self.terms.spec, self.deadline() if deadline is None else deadline
        self.session.leave()
        self._adopt(self._server.join(deadline - time.monotonic()))
        if self.terms.spec.fingerprint() != served.fingerprint():
            error = GeometryMismatchError(
                f"the server now serves {self.terms.spec.name}, this engine was attached for {served.name}: "
                "attach again"
            )
            self.give_up(error)
            raise error
        return True

    def described(self) -> dict[str, str | int]:
        """Describe the session for an engine's log."""
        return {
            "connector": __version__,
            "server": self._server.address,
            "model": self.terms.spec.name,
            "layout": str(self.terms.layout),
            "transport": by_value({link.shard: link.transport for link in self.session.links}, "shard"),
            "wire": self.terms.wire,
            "adapters": self.terms.num_adapters,
        }

    def acquire(self, names: Sequence[str], deadline: float | None = None, loaded: bool = False) -> list[Held]:
        """Acquire and prefetch adapters; waits for capacity, and for a controller that restarts; `loaded`: also until
        their weights are loaded."""
        deadline = self.deadline() if deadline is None else deadline
        retry = while_away(deadline - time.monotonic())
        with telemetry.span("lora.acquire", adapters=", ".join(names)):
            held: list[Held] = retry(self.session.acquire, names, deadline, loaded)
        self.session.prefetch({one.handle: 0.0 for one in held})
        return held

    def release(self, held: Sequence[Held]) -> None:
        """Release adapters."""
        if held and self.broken is None:
            self.session.release([one.handle for one in held])

    def close(self) -> None:
        """Leave; idempotent."""
        self.session.leave()

    def start(self, packer: Packer[M], messages: Sequence[M]) -> Exchange:
        """Push as many messages as fit; `finish` pushes the rest. Raises StepError."""
        self.lanes.settle()
        if (broken := self.broken) is not None:
            raise broken
        if self.terms.coordination == "leader":
            messages = in_step(messages, self.terms.layout.stage_shards(packer.site.layer))
        exchange = Exchange(self.lanes, packer, time.monotonic() + self.timeout_seconds, self.observe)
        for shard in exchange.queue(messages):
            exchange.push(shard)
        return exchange


def by_value(values: Mapping[int, object], what: str) -> str:
    """Describe one value for all, or each with its indices: `shm`, or `shard 0, 1: shm; shard 2, 3: tcp`."""
    holders: dict[str, list[int]] = {}
    for index, value in values.items():
        holders.setdefault(str(value), []).append(index)
    if len(holders) == 1:
        return next(iter(holders))
    return "; ".join(f"{what} {', '.join(map(str, indices))}: {value}" for value, indices in holders.items())
