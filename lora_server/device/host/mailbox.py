"""The mailbox of a shard's host and its kernel, in host memory that the kernel sees: mailbox.cuh.

A command is taken at some turn, and holds for all that is ordered behind it: what it gave up is free once that turn
is done. Notes are the kernel's.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from lora_server.device.protocol.codes import COMMANDS, NOTES, CommandKind, NoteKind
from lora_server.device.protocol.gpu import Gpu
from lora_server.device.protocol.layout import MAILBOX
from lora_server.errors import ShardUnavailableError

TAKEN_SECONDS = 10.0  # for a kernel to take a command; one without a heartbeat ends its process before
LOOK_SECONDS = 1e-4


class Note(NamedTuple):
    """A note about the client at `link`; `what` is a handle or a Refusal."""

    kind: NoteKind
    link: int
    seq: int
    what: int


class Mailbox:
    """The mailbox. Thread-safe; one thread takes notes."""

    def __init__(self, gpu: Gpu) -> None:
        self._memory = mmap.mmap(-1, MAILBOX.itemsize)
        self.address, self._unpin = gpu.pin(memoryview(self._memory))
        self._box = np.frombuffer(self._memory, MAILBOX)[0]
        self._lock = threading.Lock()
        self._posted = self._seen = self._heard = 0  # commands posted; those whose turn was noted; notes
        self._turns: dict[int, int] = {}
        self.closed = False

    # -- commands

    def post(self, kind: CommandKind, link: int = 0, words: Sequence[int] = ()) -> int:
        """Post a command; return its number. Waits for room. Raises ShardUnavailableError if the kernel takes none."""
        deadline = time.monotonic() + TAKEN_SECONDS
        while (number := self.try_post(kind, link, words)) is None:
            _pause(deadline, f"{kind.name}: no room for it in the mailbox")
        return number

    def try_post(self, kind: CommandKind, link: int = 0, words: Sequence[int] = ()) -> int | None:
        """Post a command; return its number, or None without room."""
        with self._lock:
            self._note_turns()
            if self._posted - self._seen >= COMMANDS:
                return None
            number, command = self._posted, self._box["commands"][self._posted % COMMANDS]
            command["kind"], command["link"] = kind, link
            command["words"][: len(words)] = words
            self._posted += 1
            self._box["posted"] = self._posted
            return number

    def _note_turns(self) -> None:
        """Note the turns of commands that were taken: the kernel overwrites one when it takes the 16th after it."""
        for number in range(self._seen, int(self._box["taken"])):
            self._turns[number] = int(self._box["acks"][number % COMMANDS])
            self._seen = number + 1

    def holds(self, number: int) -> bool:
        """Tell whether a command was taken, and all that was ordered before it is done; once True, it stays so."""
        with self._lock:
            self._note_turns()
            turn = self._turns.get(number)
            if self.closed or (number < self._seen and turn is None):
                return True
            if turn is None or self.done < turn:
                return False
            del self._turns[number]
            return True

    def settle(self, number: int) -> None:
        """Wait until a command holds; raises ShardUnavailableError."""
        deadline = time.monotonic() + TAKEN_SECONDS
        while not self.holds(number):
            _pause(deadline, f"command {number}: the kernel did not take it, or an earlier step does not end")

    # -- what the kernel says

    @property
    def done(self) -> int:
        """The newest turn that was answered, as far as the kernel said."""
        return int(self._box["done"])

    @property
    def beat(self) -> int:
        """A number that changes as long as the kernel lives."""
        return int(self._box["beat_ns"])

    @property
    def left(self) -> int:
        """The newest launch that is over."""
        return int(self._box["left"])

    @property
    def is_empty(self) -> bool:
        """Whether every command was taken."""
        return int(self._box["taken"]) >= self._posted

    def notes(self) -> list[Note]:
        """Return the notes since the last call."""
        noted, found = int(self._box["noted"]), []
        for i in range(self._heard, noted):
            kind, link, seq, what = (int(word) for word in self._box["notes"][i % NOTES])
            found.append(Note(NoteKind(kind), link, seq, what))
        if found:
            self._heard = noted
            self._box["heard"] = noted
        return found

    def abort(self) -> None:
        """Let the kernel leave at once, and compute nothing ever after."""
        self._box["abort"] = 1

    def close(self) -> None:
        """Unpin the memory, which no kernel reads any more; calls that wait return. Idempotent."""
        if not self.closed:
            self.closed = True
            self._unpin()


def _pause(deadline: float, why: str) -> None:
    if time.monotonic() > deadline:
        raise ShardUnavailableError(f"the shard's kernel: {why}; is the GPU stopped?")
    time.sleep(LOOK_SECONDS)


def wait_until(condition: Callable[[], bool], why: str) -> None:
    """Wait until a condition holds. Raises ShardUnavailableError after TAKEN_SECONDS."""
    deadline = time.monotonic() + TAKEN_SECONDS
    while not condition():
        _pause(deadline, why)
