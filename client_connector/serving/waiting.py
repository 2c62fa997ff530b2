"""Requests whose adapters have no place yet, or whose server is away: a thread asks again when there is one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from client_connector.remote import RemoteSession
from client_connector.serving.plan import Failure
from lora_server.errors import LoraServerError
from lora_server.timings import DEFAULTS, Timings
from lora_server.transport.session import Held


@dataclass(eq=False)
class Use:
    """One request's adapter. `held` is None while queued or preempted, after a failure, and for one that never acts."""

    name: str
    prompt: Sequence[int] | None = None
    request: str = ""
    trace: Mapping[str, str] | None = None  # of the request, as headers
    began: float = field(default_factory=time.monotonic)
    version: str = ""  # once the server has said it
    held: Held | None = None
    start: int = 0
    failure: Failure | None = None
    falls_back: bool = False  # the base model answers from now on, and the request says so
    queued: bool = False  # there is no place for it yet, or nobody who could give it one
    until: float = 0.0  # how long it waits for a server that is away (time.monotonic()); 0: it is there
    void: Failure | None = None  # of its newest step that was computed in vain
    num_void: int = 0
    session: RemoteSession | None = None  # in which it was asked for, with this ticket
    ticket: int = 0
    tenant: str = ""  # on whose behalf it is asked for


class Waiting:
    """Thread-safe. `again` asks for a use once more, and says whether that was answered; whoever is not queued any more
    is cancelled. While the server is away, `is_up` says so, and `give_up` hears of those that wait for it."""

    def __init__(
        self,
        again: Callable[[Use], bool],
        is_up: Callable[[], bool],
        give_up: Callable[[Use, bool], object],
        timings: Timings = DEFAULTS,
    ) -> None:
        self._timings = timings
        self._again, self._is_up, self._give_up = again, is_up, give_up
        self._uses: list[Use] = []
        self._changed = threading.Condition()
        self._closed = False
        threading.Thread(target=self._run, name="lora-admission", daemon=True).start()

    def add(self, use: Use) -> None:
        """From now on only this thread asks for it, or cancels it."""
        with self._changed:
            if use not in self._uses:
                self._uses.append(use)
            self._changed.notify()

    def __len__(self) -> int:
        return len(self._uses)

    def close(self) -> None:
        """The session is left: there is nothing to wait for."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._uses or self._closed)
                uses = list(self._uses)
            if self._closed:
                return
            given_up = [use for use in uses if not use.queued]
            for use in given_up:
                self._cancel(use)
            done = given_up + self._look([use for use in uses if use not in given_up])
            with self._changed:
                self._uses = [use for use in self._uses if use not in done or use.queued]

    def _look(self, uses: list[Use]) -> list[Use]:
        """Those that are answered."""
        away = [use for use in uses if use.until]
        if away:
            with self._changed:
                self._changed.wait_for(lambda: self._closed, self._timings.away_look)
            is_up = self._is_up()
            for use in away:
                self._give_up(use, is_up)
            return [use for use in uses if use.queued and self._again(use)] if is_up else []
        session = uses[-1].session if uses else None
        if session is None:
            return []
        try:
            tickets = [use.ticket for use in uses if use.session is session]
            decided = session.wait(tickets, self._timings.queue_wait)  # the next call sees who came or went
        except LoraServerError:  # asking again says what is the matter
            decided = [use.ticket for use in uses]
        asked = [use for use in uses if use.session is not session or use.ticket in decided]
        return [use for use in asked if self._again(use)]

    def _cancel(self, use: Use) -> None:
        if use.session is not None:
            use.session.cancel(use.ticket)
