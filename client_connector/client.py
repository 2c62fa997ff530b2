"""The engine-neutral client: start an exchange before the engine's own GEMM, finish it after.

    exchange = client.start(site, messages, x_TK, ...)     pushes; returns at once
    ... the engine's own GEMM ...
    exchange.finish(add)                                   add(message, delta) per message

One exchange at a time, from one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from client_connector.exchange import Exchange, StepTimes, Window
from client_connector.routing import Message, in_step
from lora_server.errors import GeometryMismatchError, LoraServerError
from lora_server.spec import Site
from lora_server.transport.session import Held, Server, Session, Terms

TIMEOUT_SECONDS = 30.0


class Client:
    """A joined client; `timeout_seconds` bounds a join, and a step.

    After a broken step, `recover` joins anew; adapters must then be held again.
    """

    def __init__(self, server: Server, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        self._server = server
        self.timeout_seconds = timeout_seconds
        self.observe: Callable[[StepTimes], None] | None = None
        self.session: Session = server.join(timeout_seconds)
        self._reset()

    def _reset(self) -> None:
        self.broken: LoraServerError | None = None
        self.pushed = [0] * len(self.session.links)
        self.consumed = [0] * len(self.session.links)  # newest seq whose response was consumed
        self.terms: Terms = self.session.terms
        self.placement = self.terms.placement

    def lost(self) -> LoraServerError | None:
        """What broke the session, if anything did: a step, a shard's death, the end of the lease."""
        try:
            self.session.check()
            for link in self.session.links:
                link.check()
        except LoraServerError as error:
            self.broken = self.broken or error
        return self.broken

    def recover(self) -> bool:
        """Join anew if a step broke the session or its lease is gone; whether it did."""
        if self.lost() is None:
            return False
        served = self.terms.spec
        self.session.leave()
        self.session = self._server.join(self.timeout_seconds)
        self._reset()
        if self.terms.spec.fingerprint() != served.fingerprint():
            self.broken = GeometryMismatchError(
                f"the server now serves {self.terms.spec.name}, this engine was attached for {served.name}: "
                "attach again"
            )
            raise self.broken
        return True

    def acquire(self, names: Sequence[str]) -> list[Held]:
        """Hold adapters and tell the server that they are needed soon."""
        held = self.session.acquire(names)
        self.session.prefetch([one.handle for one in held])
        return held

    def release(self, held: Sequence[Held]) -> None:
        """Let go of adapters."""
        if held and self.broken is None:
            self.session.release([one.handle for one in held])

    def close(self) -> None:
        """Leave; idempotent."""
        self.session.leave()

    def start(
        self,
        site: Site,
        messages: Sequence[Message],
        x: torch.Tensor,
        *,
        decode: bool,
        by_entry: bool = False,
        weights: torch.Tensor | None = None,
        window: Window | None = None,
    ) -> Exchange:
        """Push what fits; the rest follows while `finish` consumes.

        x: activations of the engine's rows; or, with `by_entry`, one per entry (indexed by
        `Message.entries_N`). With `weights` (float32, indexed alike) the deltas come back weighted
        and summed per row of the message, otherwise one per entry. With a `window` x has its input
        columns only, and deltas its output columns side by side. Raises StepError.
        """
        if self.broken is not None:
            raise self.broken
        if self.terms.coordination == "leader":
            messages = in_step(messages, self.terms.layout.stage_shards(site.layer))
        exchange = Exchange(self, site, messages, x.detach(), decode, by_entry, weights, window)
        exchange.begin()
        return exchange
