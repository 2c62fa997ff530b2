"""A client's way to one shard: how far it pushed and consumed, and what broke it."""

from __future__ import annotations

from lora_server.errors import LoraServerError, StepError
from lora_server.transport.base import Link


class Lane:
    """One link and its sequence. Used by one thread at a time.

    As a context manager: an error inside means that client and shard may no longer agree on seqs, so
    the lane is broken, and with it the session.
    """

    def __init__(self, link: Link) -> None:
        self.link = link
        self.shard = link.shard
        self.depth = link.region.layout.depth
        self.pushed = 0
        self.consumed = 0  # newest seq whose response was consumed
        self.broken: LoraServerError | None = None

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and self.broken is None:
            self.broken = (
                error
                if isinstance(error, StepError)
                else StepError(f"an earlier step was interrupted by {error!r}; the next request joins anew")
            )

    def drain(self, deadline: float) -> None:
        """Consume what a failed exchange left behind."""
        if self.consumed < self.pushed:
            self.link.wait(self.pushed, deadline)
            self.consumed = self.pushed
