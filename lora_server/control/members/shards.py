"""The controller's side of its shard processes: the table of those that are up, commands to them, their reports."""

from __future__ import annotations

import _thread
import contextlib
import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from lora_server.clock import SYSTEM, Clock
from lora_server.errors import LeaseError, LoraServerError, ServerUnavailableError, ShardUnavailableError, rebuild
from lora_server.placement import Layout
from lora_server.timings import Timings
from lora_server.wire import bounds
from lora_server.wire import lora_server_pb2 as pb
from lora_server.wire.proofs import Counts


class SetOnce:
    """A flag that is set once, and may be waited for. Unlike an Event it is small: loads make one per shard.

    Its lock guards nothing, so it is none of those whose order tests/lock_order.py checks.
    """

    __slots__ = ("_is_set", "_unset")

    def __init__(self) -> None:
        self._is_set, self._unset = False, _thread.allocate_lock()
        self._unset.acquire()  # until it is set

    def set(self) -> None:
        """Set it, and wake the threads that wait."""
        self._is_set = True
        self._unset.release()

    def is_set(self) -> bool:
        """Return whether it was set."""
        return self._is_set

    def wait(self, seconds: float) -> bool:
        """Return whether it is set within so long."""
        if self._unset.acquire(timeout=seconds):
            self._unset.release()
        return self._is_set


@dataclass(slots=True)
class PendingCommand:
    """A command on its way; `finished` is set when the shard reported, or died."""

    shard: int
    then: Callable[[LoraServerError | None], None] | None = None
    finished: SetOnce = field(default_factory=SetOnce)
    error: LoraServerError | None = None
    is_needless: bool = False  # the shard died, and its twin is up

    def finish(self, error: LoraServerError | None) -> None:
        """Record the outcome, call `then` with it, and wake the threads that wait for it."""
        self.error = error
        if self.then is not None:
            self.then(error)
        self.finished.set()


_IDS = itertools.count(1)  # of commands that have an outcome


class SharedCommand:
    """A command that many shards get, encoded once. Thread-safe.

    What clients hold changes faster than 256 shards can be sent messages: until the first shard takes a command about
    that, later changes are added to it.
    """

    MOST_HOLDS = 1000

    def __init__(self, command: pb.ShardCommand, has_outcome: bool = False) -> None:
        self.command, self._data, self._is_open = command, b"", command.HasField("uses")
        command.id = next(_IDS) if has_outcome else 0
        self._lock = threading.Lock()

    def add(self, uses: pb.Uses) -> bool:
        """Add changes that come after its own; return False where it is too late for that."""
        with self._lock:
            own = self.command.uses
            if not self._is_open or len(own.holds) > self.MOST_HOLDS:
                return False
            own.holds.extend(uses.holds)  # shards apply them in order
            if uses.HasField("active"):
                more, fewer, new = {*own.active.more}, {*own.active.fewer}, uses.active
                more, fewer = (more - {*new.fewer}) | {*new.more}, (fewer - {*new.more}) | {*new.fewer}
                own.active.CopyFrom(pb.Active(more=more, fewer=fewer, trace=new.trace or own.active.trace))
            return True

    def close(self) -> None:
        """Let nothing be added any more: another command follows it."""
        with self._lock:
            self._is_open = False

    def encode(self) -> bytes:
        """Return it as bytes of a ShardCommands; nothing can be added any more."""
        with self._lock:
            self._is_open = False
            self._data = self._data or pb.ShardCommands(commands=[self.command]).SerializeToString()
            return self._data


class CommandQueue:
    """Commands to one shard, in order, and those that it has not reported on yet. Thread-safe.

    One stream takes them: as they come, by iteration, or those that are there, each time that `on_put` was called.
    """

    def __init__(self, shard: int) -> None:
        self._shard = shard
        self.on_put: Callable[[], object] = lambda: None
        self._commands: queue.SimpleQueue[SharedCommand | None] = queue.SimpleQueue()
        self._last: SharedCommand | None = None
        self._pending: dict[int, PendingCommand] = {}
        self._lock = threading.Lock()
        self._closed = self._is_needless = False

    def send(
        self, command: pb.ShardCommand | SharedCommand, then: Callable[[LoraServerError | None], None] | None = None
    ) -> PendingCommand:
        """Queue a command; the caller may wait for it, or be called with the outcome."""
        shared = command if isinstance(command, SharedCommand) else SharedCommand(command, has_outcome=True)
        pending = PendingCommand(self._shard, then)
        with self._lock:
            closed = self._closed
            if not closed:
                self._pending[shared.command.id] = pending
        if closed:
            pending.is_needless = self._is_needless
            pending.finish(self._death())
        else:
            self.tell(shared)
        return pending

    def tell(self, command: SharedCommand) -> None:
        """Queue a command that has no outcome. Other shards may get the same."""
        with self._lock:
            if self._last is not None:
                self._last.close()
            self._last = command
            self._commands.put(command)
        self.on_put()

    def finish(self, done: pb.Done) -> None:
        """Complete the command that the shard reports as done."""
        with self._lock:
            pending = self._pending.pop(done.command, None)
        if pending is not None:
            pending.finish(rebuild(done.code, done.message) if done.code else None)

    def close(self, twin_is_up: bool = False) -> None:
        """Fail all pending commands, since the stream ended."""
        with self._lock:
            self._closed, self._is_needless = True, twin_is_up
            pending, self._pending = list(self._pending.values()), {}
        for waiting in pending:
            waiting.is_needless = twin_is_up
            waiting.finish(self._death())
        self._commands.put(None)
        self.on_put()

    def __iter__(self) -> Iterator[pb.ShardCommand]:
        """Yield what the stream sends, until the queue is closed."""
        while (command := self._commands.get()) is not None:
            command.encode()
            yield command.command

    def take(self) -> list[bytes | None]:
        """Return the messages that the stream is to send now, each with as many commands as it has room for; None at
        the end: the queue is closed."""
        commands: list[SharedCommand | None] = []
        with contextlib.suppress(queue.Empty):
            while True:
                commands.append(self._commands.get_nowait())
        is_over = None in commands
        taken: list[bytes | None] = [*joined(one.encode() for one in commands if one is not None)]
        return [*taken, None] if is_over else taken

    def _death(self) -> ShardUnavailableError:
        return ShardUnavailableError(f"shard {self._shard}: the shard went away before it finished the command")


class ShardHandle:
    """One live incarnation of a shard, as long as its stream lives."""

    def __init__(self, registration: pb.Registration) -> None:
        self.registration = registration
        self.shard, self.node = registration.shard, registration.node
        self.generation = registration.generation  # of its placement
        self.epoch = 0  # of its claim to the rank
        self.stats = pb.ShardStats()
        self.leaving = False  # it said that it stops
        self.calls = Counts()  # for files
        self.heard = 0.0  # when it last reported, by the table's clock
        self.commands = CommandQueue(self.shard)


@dataclass
class ShardRank:
    """A shard's number, known also when its process ends: its newest claim, its restarts (-1 until its first process
    registers), and the process that was lost."""

    claim: int = 0
    restarts: int = -1
    lost: ShardHandle | None = None


class ShardTable:
    """The shards of the layout, as far as they are up. Thread-safe.

    Each rank has one claimant at a time, and a shard that replaces another gets a higher claim. While the server is
    resized, `other` has the shards of the placement that does not serve: they are sent every broadcast, too.
    """

    def __init__(
        self,
        layout: Layout,
        coordination: str,
        silence_seconds: float = Timings.shard_silence,
        clock: Clock = SYSTEM,
        generation: int = 1,
    ) -> None:
        """`generation`: of the placement that the shards of this table are claimed for."""
        self.layout, self._coordination, self.generation = layout, coordination, generation
        self._silence_seconds, self._clock = silence_seconds, clock
        self._live: dict[int, ShardHandle] = {}  # by number, in order
        self._last_shared: SharedCommand | None = None  # the last command to all of them
        self.closed = False
        self.ranks = {shard: ShardRank() for shard in range(layout.num_shards)}
        self.other: ShardTable | None = None
        self._guard = threading.RLock()

    def arrive(self, handle: ShardHandle, settled: bool = True) -> None:
        """Add a shard that registered, and give it a claim. Raises LeaseError if it was replaced while it was away or
        its claim is of another generation, ServerUnavailableError while another shard serves its rank.

        While a restarted controller is not settled, a shard that had a claim replaces one that never had.
        """
        shard, registration = handle.shard, handle.registration
        with self._guard:
            if self.closed:
                raise ServerUnavailableError(f"shard {shard}: the server is stopping")
            if registration.generation not in (0, self.generation):
                raise LeaseError(
                    f"shard {shard}: got a claim of placement generation {registration.generation}, expected "
                    f"{self.generation}; pid {registration.pid} of node {handle.node} ends and is started again"
                )
            handle.generation = self.generation
            older, newest = self._live.get(shard), self.ranks[shard].claim
            comes_back = older is not None and older.registration.instance == registration.instance
            usurped = not settled and older is not None and not older.registration.epoch and bool(registration.epoch)
            if registration.epoch and registration.epoch < newest and not usurped and not comes_back:
                raise LeaseError(
                    f"shard {shard}: pid {registration.pid} of node {handle.node} was replaced while it was away "
                    f"(its claim is {registration.epoch}, the newest {newest}); it ends"
                )
            newer = registration.epoch > newest > 0
            if older is not None and not (comes_back or newer or usurped or self._is_silent(older)):
                raise ServerUnavailableError(
                    f"shard {shard}: served by pid {older.registration.pid} of node {older.node}; is a node rank used "
                    "twice?"
                )
            self._claim(handle, older if comes_back else None)
            self._live = dict(sorted({**self._live, shard: handle}.items()))
            handle.heard, self._last_shared = self._clock.now(), None
        if older is not None:
            older.commands.close()

    def _claim(self, handle: ShardHandle, itself: ShardHandle | None) -> None:
        """Give a shard its claim. Later claims are higher, also those of later controllers."""
        shard, registration = handle.shard, handle.registration
        newest, restarts = self.ranks[shard].claim, self.ranks[shard].restarts
        if registration.epoch >= newest and registration.epoch:
            handle.epoch = registration.epoch
        elif itself is not None:
            handle.epoch = itself.epoch
        else:
            handle.epoch = max(newest + 1, int(self._clock.time()))
        known = max(restarts, registration.restarts if registration.epoch else -1)
        restarts = known if registration.epoch or itself is not None else known + 1
        self.ranks[shard] = ShardRank(handle.epoch, restarts)

    def close(self) -> None:
        """End every stream and every wait, since the server stops."""
        with self._guard:
            self.closed = True
            live = all_live(self)
        for handle in live:
            handle.commands.close()

    def depart(self, handle: ShardHandle) -> bool:
        """Remove a shard that lost its stream; return False if a newer incarnation has taken its place."""
        with self._guard:
            current = self._live.get(handle.shard) is handle
            if current:
                del self._live[handle.shard]
                self.ranks[handle.shard].lost = None if handle.leaving else handle
            twin_is_up = any(twin in self._live for twin in self.layout.twins(handle.shard) if twin != handle.shard)
        handle.commands.close(twin_is_up)
        return current

    def end_silent(self, seconds: float) -> None:
        """End the streams of shards that are silent for so long, if a twin is heard. One that was only stopped
        registers again."""
        with self._guard:
            now = self._clock.now()
            heard = {shard for shard, handle in self._live.items() if now - handle.heard <= seconds}
            silent = [handle for shard, handle in self._live.items() if shard not in heard]
        for handle in silent:
            if heard.intersection(self.layout.twins(handle.shard)):
                handle.commands.close(twin_is_up=True)

    def live(self) -> dict[int, ShardHandle]:
        """Return the shards that are up, by number."""
        with self._guard:
            return dict(self._live)

    def heard_from(self, handle: ShardHandle) -> None:
        """Note that a shard's message came; what it reports may wait to be applied."""
        handle.heard = self._clock.now()

    def update(self, handle: ShardHandle, stats: pb.ShardStats) -> None:
        """Store the counters of a shard's report."""
        with self._guard:
            handle.stats, handle.heard = stats, self._clock.now()

    def missing(self) -> list[int]:
        """Return the shards that cannot serve now; in leader mode also leaders that lack followers."""
        with self._guard:
            return [shard for shard in range(self.layout.num_shards) if not self._is_up(shard)]

    def lost(self) -> dict[int, tuple[ShardHandle, float]]:
        """Return the shards that ended without notice, or are silent, and when each was last heard (time.time())."""
        with self._guard:
            silent = {shard: handle for shard, handle in self._live.items() if self._is_silent(handle)}
            gone = {shard: rank.lost for shard, rank in self.ranks.items() if rank.lost is not None}
            ago = self._clock.time() - self._clock.now()
            return {shard: (handle, ago + handle.heard) for shard, handle in (gone | silent).items()}

    def _is_up(self, shard: int) -> bool:
        handle = self._live.get(shard)
        if handle is None or self._is_silent(handle):
            return False
        leads = self._coordination == "leader" and self.layout.ep_rank(shard) == 0
        return not leads or handle.stats.followers >= self.layout.ep - 1

    def _is_silent(self, handle: ShardHandle) -> bool:
        """Return whether a shard is silent for so long that it cannot be serving (stopped, or its host is gone)."""
        return self._clock.now() - handle.heard > self._silence_seconds

    def require_up(self) -> dict[int, ShardHandle]:
        """Return the shards that are up, by number. Never waits.

        Raises ServerUnavailableError naming those that are not up and have no twin that is.
        """
        with self._guard:
            if unserved := self.layout.unserved(self.missing()):
                raise ServerUnavailableError(
                    f"shards {unserved} of {self.layout} are not up; "
                    "the server is starting or restarting them: try again"
                )
            return dict(self._live)

    def broadcast(self, command: pb.ShardCommand) -> list[PendingCommand]:
        """Send a command to every live shard."""
        shared, sent = SharedCommand(command, has_outcome=True), []
        for handle in all_live(self):
            pending = handle.commands.send(shared)
            if handle.generation == self.generation:
                sent.append(pending)
        return sent

    def tell(self, command: pb.ShardCommand) -> None:
        """Send every live shard a command that has no outcome; changes of holds may join an earlier one."""
        with self._guard:
            joins = self.other is None and self._last_shared is not None and command.HasField("uses")
            if joins and self._last_shared is not None and self._last_shared.add(command.uses):
                return
            self._last_shared = SharedCommand(command)
            for handle in all_live(self):
                handle.commands.tell(self._last_shared)


def all_live(table: ShardTable) -> list[ShardHandle]:
    """Return the live shards of a table, then those of the other placement of a resize."""
    with table._guard:
        other = table.other
        return [*table.live().values(), *(other.live().values() if other is not None else ())]


def twins_up(table: ShardTable, handle: ShardHandle) -> set[int] | None:
    """Return the twins of a shard that are up, it among them; None where its placement does not serve."""
    with table._guard:
        if handle.generation != table.generation:
            return None
        return table._live.keys() & set(table.layout.twins(handle.shard))


def swap(one: ShardTable, other: ShardTable) -> None:
    """Give each of two tables the placement and the shards of the other."""
    with one._guard, other._guard:
        one.layout, other.layout = other.layout, one.layout
        one.generation, other.generation = other.generation, one.generation
        one.ranks, other.ranks = other.ranks, one.ranks
        one._live, other._live = other._live, one._live


def joined(commands: Iterable[bytes]) -> Iterator[bytes]:
    """Yield commands as messages of about MESSAGE_BYTES: encoded ShardCommands, put behind each other, are one."""
    parts, size = list[bytes](), 0
    for one in commands:
        if parts and size + len(one) > bounds.MESSAGE_BYTES:
            yield b"".join(parts)
            parts, size = [], 0
        parts.append(one)
        size += len(one)
    if parts:
        yield b"".join(parts)


def wait_all(pending: list[PendingCommand], seconds: float, what: str) -> None:
    """Wait until every command finished; raises the first error, or ServerUnavailableError at the deadline."""
    deadline = time.monotonic() + seconds
    for command in pending:
        if not command.finished.wait(max(0.0, deadline - time.monotonic())):
            raise ServerUnavailableError(f"shard {command.shard}: {what} did not finish within {seconds:g} s")
        if command.error is not None and not command.is_needless:
            raise command.error
