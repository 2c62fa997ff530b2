"""Every call comes through here: who makes it, and whether they may.

What is known of tokens and tenants is looked at twice a second, so that all controllers of one database agree within
two seconds; no call waits for the database.
"""

from __future__ import annotations

import hmac
import threading
import time
from collections.abc import Callable

import structlog

from lora_server.access import rights, tokens
from lora_server.access.audit import Audit
from lora_server.access.identity import ANYBODY, OPERATOR, Identity, Role
from lora_server.access.limits import Limits
from lora_server.access.names import Names
from lora_server.access.store import Known, Store, Tenant
from lora_server.errors import LoraServerError, PermissionDeniedError, ServerUnavailableError, UnauthenticatedError
from lora_server.registry.database import Database
from lora_server.timings import Timings

CLOSE_SECONDS = 5.0
STRANGER = Identity("-", Role.VIEWER)  # of no tenant; sees what all may
NODE = Identity(OPERATOR, Role.VIEWER, "node")  # a process of the server itself
MISSING = "got no token, expected one: give LORA_SERVER_TOKEN_FILE, or LORA_SERVER_TOKEN"
log = structlog.get_logger()


class Gate:
    """Thread-safe. Tokens are required once there is one, or from the start on."""

    def __init__(
        self,
        database: Database | None = None,
        required: bool = False,
        node_secret: str = "",
        look_seconds: float = Timings.token_look,
    ) -> None:
        """Without a database there are no tokens. `node_secret` proves processes of the server itself.

        Raises ServerUnavailableError.
        """
        self._node_header = f"Node {node_secret}".encode() if node_secret else b""
        self.store = Store(database) if database is not None else None
        self.audit, self.limits = Audit(database), Limits()
        self._look_seconds = look_seconds
        self.on_change: Callable[[], object] = lambda: None  # tokens or tenants are others
        self._required = required
        self._known = self.store.load() if self.store is not None else Known()
        self._lock = threading.Lock()  # one look at a time
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="access", daemon=True)
        if self.store is not None:
            self._thread.start()

    @property
    def required(self) -> bool:
        """Whether everybody has to show a token."""
        return self._required or bool(self._known.tokens)

    @property
    def names(self) -> Names:
        """What names mean, as it is now."""
        return self._known.names

    def tenant(self, name: str) -> Tenant:
        """Its limits; the operator has none."""
        return self._known.tenants.get(name) or Tenant(name)

    # -- calls

    def identify(self, text: str) -> Identity:
        """Whose token this is. Raises UnauthenticatedError, the same whatever is wrong with it."""
        shown = tokens.parse(text)
        token = self._known.tokens.get(shown.id) if shown is not None else None
        if shown is None or token is None or not token.is_proven_by(shown, time.time()):
            raise UnauthenticatedError("got a token that is not good here, or not any more; ask an admin for another")
        return token.identity

    def who(self, authorization: str) -> Identity:
        """Whom a header proves. Raises UnauthenticatedError."""
        if not authorization:
            if self.required:
                raise UnauthenticatedError(MISSING)
            return ANYBODY
        if self._node_header and hmac.compare_digest(authorization.encode(), self._node_header):
            return NODE if self.required else ANYBODY
        return self.identify(tokens.of_header(authorization))

    def admit(self, call: str, authorization: str) -> Identity:
        """Who makes this call, with that header. Raises UnauthenticatedError, PermissionDeniedError."""
        who = None
        try:
            if rights.RIGHTS.get(call, rights.Right()).everybody:
                return STRANGER
            who = self.who(authorization)
            rights.check(call, who)
            return who
        except (UnauthenticatedError, PermissionDeniedError) as error:
            self.audit.note(who, call, "", error)
            raise

    def allows(self, call: str, authorization: str) -> bool:
        """Whether `admit` would; of a try nothing is kept."""
        try:
            rights.check(call, self.who(authorization))
        except (UnauthenticatedError, PermissionDeniedError):
            return False
        return True

    def acting(self, who: Identity, on_behalf_of: str) -> Identity:
        """Whom a call is for. Raises PermissionDeniedError."""
        if not on_behalf_of or on_behalf_of == who.tenant:
            return who
        tenant = self._known.tenants.get(on_behalf_of)
        if not who.speaks_for_others or tenant is None or tenant.removed:
            raise PermissionDeniedError(
                f"on behalf of {on_behalf_of[:80]!r}: got a token of {who}, expected an engine of the operator, and a "
                "tenant that there is"
            )
        return Identity(on_behalf_of, who.role, who.token)

    def is_good(self, tenant: str, token_id: str) -> bool:
        """Whether a lease that was made with this token goes on."""
        if not token_id:
            return not self.required
        token = self._known.tokens.get(token_id)
        return token is not None and not token.revoked and token.tenant == tenant

    def changed(self, who: Identity, call: str, subject: str, error: LoraServerError | None) -> None:
        """A change was made, or was not: it is kept before it is answered."""
        self.audit.note(who, call, subject, error)
        self.audit.flush()

    # -- what is known

    def look(self) -> None:
        """At the database, where something changed. Raises ServerUnavailableError."""
        assert self.store is not None
        with self._lock:
            if self.store.changes() == self._known.changes:
                return
            self._known = self.store.load()
        self.on_change()

    def _run(self) -> None:
        while not self._stopping.wait(self._look_seconds):
            try:
                self.look()
                self.audit.flush()
            except ServerUnavailableError as error:
                log.warning("tokens cannot be looked at now: those that were known count on", reason=str(error))
            except Exception:
                log.exception("looking at tokens failed; it goes on")

    def close(self) -> None:
        """Writes what waits to be written. Idempotent."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(CLOSE_SECONDS)
        self.audit.flush()
