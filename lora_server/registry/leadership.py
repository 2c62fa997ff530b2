"""Leadership: which of a server's controllers may write to the registry, and admit requests.

A session of the database holds an advisory lock, which the database releases when the session ends: at once when its
process dies, and after some seconds without a sign of life. A controller that gets the lock counts the server's epoch
up. Every write of a controller checks its epoch in the same transaction, so one that was replaced changes nothing more.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import structlog
from sqlalchemy import BigInteger, Column, Connection, String, Table, Text, func, select
from sqlalchemy import exc as sql
from sqlalchemy.dialects.postgresql import insert

from lora_server.errors import NotLeaderError
from lora_server.registry.database import Database, metadata

BEATS = 6  # of a leader, in the time after which it counts as gone
log = structlog.get_logger()

leaders = Table(
    "leaders",
    metadata,
    Column("server", String(64), primary_key=True),  # digest of its controllers' addresses
    Column("epoch", BigInteger, nullable=False),
    Column("address", Text, nullable=False),  # of the controller that leads
)


class LastLeader(NamedTuple):
    """The controller that led last, as the database knows it; epoch 0: none has."""

    epoch: int
    address: str


class Leadership:
    """One controller's attempt to lead, and its lead. `check` is thread-safe; one thread at a time calls the others."""

    def __init__(self, database: Database, controllers: str, address: str, seconds: float) -> None:
        """`controllers`: the addresses of the server's controllers, as each of them has them. `address`: this one's.
        `seconds`: without a sign of a leader for so long, the database releases its lock."""
        self.database, self._address, self._seconds = database, address, seconds
        digest = hashlib.sha256(controllers.encode()).hexdigest()
        self._server, self.key = digest[:40], int(digest[:15], 16)
        self._session: Connection | None = None
        self.has_lock = False  # as of the last look
        self._tries_from = 0.0  # when `attempt` may have the lock
        self.epoch = 0  # of this controller's lead
        self.leader = LastLeader(0, "")  # as of the last look

    def attempt(self) -> bool:
        """Try to lead; return whether this controller does now. False, too, while the database is away, and until a
        leader that lost its session by that has had the time to take its lock again."""
        try:
            self._look(tries=time.monotonic() >= self._tries_from)
            if not self.has_lock:
                return False
            self.epoch = self._count_up()
        except sql.DBAPIError as error:
            self._forget_session(error)
            self._tries_from = time.monotonic() + self._seconds
            return False
        self.database.checks.append(self.check)
        return True

    def keep(self, stopping: threading.Event, other_leader: Callable[[], str]) -> str:
        """Keep the lead until `stopping` is set, or another controller leads: return its address then, else nothing.

        While the database is away for all controllers none can take over, so this one goes on. `other_leader` asks the
        others whether it is: it returns the address of one that leads.
        """
        while not stopping.wait(self._seconds / BEATS):
            try:
                self._look()
                other = self.leader.address if self.leader.epoch > self.epoch else ""
            except sql.DBAPIError as error:
                self._forget_session(error)
                other = other_leader()
            if other:
                return other
        return ""

    def check(self, connection: Connection) -> None:
        """Begin a write: raise NotLeaderError if another controller leads, and none can take over until its end."""
        leader = self._read(connection, locks=True)
        if leader.epoch != self.epoch:
            raise NotLeaderError(
                f"controller {self._address} leads no longer: {leader.address} does since epoch {leader.epoch}, and "
                f"got a write of epoch {self.epoch}; nothing was changed: call that controller"
            )

    def close(self) -> None:
        """Give the lead up. Idempotent."""
        self._forget_session(None)

    def _look(self, tries: bool = True) -> None:
        """Learn which controller leads; with `tries`, try to have the lock."""
        if self._session is None:
            self._session = self.database.session(self._seconds)
        if tries and not self.has_lock:
            self.has_lock = bool(self._session.scalar(select(func.pg_try_advisory_lock(self.key))))
        self.leader = self._read(self._session)

    def _forget_session(self, error: sql.DBAPIError | None) -> None:
        session, self._session = self._session, None
        had_lock, self.has_lock = self.has_lock, False
        if error is not None and had_lock:
            log.warning("lost the session that holds the lead; trying again", reason=str(error.orig or error))
        if session is not None:
            session.invalidate()
            session.close()

    def _read(self, connection: Connection, locks: bool = False) -> LastLeader:
        query = select(leaders.c.epoch, leaders.c.address).where(leaders.c.server == self._server)
        row = connection.execute(query.with_for_update(read=True) if locks else query).one_or_none()
        return LastLeader(*row) if row is not None else LastLeader(0, "")

    def _count_up(self) -> int:
        """Count the epoch up; waits for writes of the last leader that have begun. Raises DBAPIError."""
        assert self._session is not None
        first = insert(leaders).values(server=self._server, epoch=1, address=self._address)
        values = {"epoch": leaders.c.epoch + 1, "address": self._address}
        counted = first.on_conflict_do_update(index_elements=["server"], set_=values).returning(leaders.c.epoch)
        return int(self._session.execute(counted).scalar_one())
