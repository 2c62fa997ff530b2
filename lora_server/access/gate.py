"""Authenticates and authorizes every call."""

from __future__ import annotations

import hmac
import threading
import time
from collections.abc import Callable

import structlog

from lora_server.access import rights, tokens
from lora_server.access.audit import Audit
from lora_server.access.identity import ANYBODY, OPERATOR, Identity, Role
from lora_server.access.limits import TenantLimits
from lora_server.access.names import Names
from lora_server.access.store import NOTHING, Store, Tenant
from lora_server.errors import LoraServerError, PermissionDeniedError, ServerUnavailableError, UnauthenticatedError
from lora_server.registry.database import Database
from lora_server.timings import Timings
from lora_server.wire import proofs

CLOSE_SECONDS = 5.0
log = structlog.get_logger()


class AccessCache:
    """A snapshot of the store, which a thread refreshes; all controllers of a database agree within two seconds.

    Thread-safe. `known` is the snapshot; `on_change` is called after it was replaced.
    """

    def __init__(self, store: Store | None, audit: Audit, seconds: float) -> None:
        """Start a thread that refreshes the snapshot and writes the audit log every `seconds`. Without a store there is
        no thread, and the snapshot is empty."""
        self._store, self._audit, self._seconds = store, audit, seconds
        self.on_change: Callable[[], object] = lambda: None
        self.known = store.load() if store is not None else NOTHING
        self._lock = threading.Lock()  # one refresh at a time
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="access", daemon=True)
        if store is not None:
            self._thread.start()

    def refresh(self) -> None:
        """Read the changes from the database into a new snapshot; keep the old one if the database is unreachable."""
        assert self._store is not None
        with self._lock:
            try:
                known = self._store.load(self.known)
            except ServerUnavailableError as error:
                log.warning("cannot refresh tokens; keeping the cached set", reason=str(error))
                return
            if known is self.known:
                return
            self.known = known
        self.on_change()

    def _run(self) -> None:
        while not self._stopping.wait(self._seconds):
            try:
                self.refresh()
                self._audit.flush(seconds=0.0)
            except Exception:
                log.exception("refreshing tokens failed; trying again")

    def close(self) -> None:
        """Stop the thread; idempotent."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(CLOSE_SECONDS)


PUBLIC = Identity("-", Role.VIEWER)  # of no tenant; sees what needs no token
NODE = Identity(OPERATOR, Role.VIEWER, "node")  # a process of the server itself
MISSING = "got no token, expected one: give LORA_SERVER_TOKEN_FILE, or LORA_SERVER_TOKEN"


class Gate:
    """Tokens are required once there is one, or from the start if `required`. Thread-safe."""

    def __init__(
        self,
        database: Database | None = None,
        required: bool = False,
        node_secret: str = "",
        look_seconds: float = Timings.token_look,
    ) -> None:
        """Without a database there are no tokens. Processes of the server itself prove themselves by `node_secret`.

        Raises ServerUnavailableError.
        """
        self._node_secret, self._signatures = node_secret.encode(), proofs.Freshness()
        self.store = Store(database) if database is not None else None
        self.audit, self.limits = Audit(database), TenantLimits()
        self._required = required
        self.cache = AccessCache(self.store, self.audit, look_seconds)

    @property
    def required(self) -> bool:
        """Return whether a call without a token is refused."""
        return self._required or bool(self.cache.known.tokens)

    @property
    def names(self) -> Names:
        """Return the adapters' names and shares, as of the last refresh."""
        return self.cache.known.names

    def tenant(self, name: str) -> Tenant:
        """Return a tenant with its limits; the operator has none."""
        return self.cache.known.tenants.get(name) or Tenant(name)

    # -- calls

    def identify(self, text: str) -> Identity:
        """Return the identity of a token. Raises UnauthenticatedError, with one text for all reasons."""
        shown = tokens.parse(text)
        token = self.cache.known.tokens.get(shown.id) if shown is not None else None
        if shown is None or token is None or not token.is_proven_by(shown, time.time()):
            raise UnauthenticatedError(tokens.NOT_GOOD)
        return token.identity

    def shown(self, call: str, text: str) -> Identity:
        """Return the identity that a token, or a signed header of this call, proves. Raises as `identify`."""
        return self.who(call, text) if text.startswith(proofs.SCHEME) else self.identify(text)

    def who(self, call: str, authorization: str) -> Identity:
        """Return the identity that a call's header proves. Raises UnauthenticatedError."""
        if not authorization:
            if self.required:
                raise UnauthenticatedError(MISSING)
            return ANYBODY
        signed = proofs.Signed.parse(authorization)
        if signed is None:
            return self.identify(tokens.of_header(authorization))
        who, _ = self._signer(call, signed)
        self._signatures.check(signed)
        return who

    def signed(self, call: str, authorization: str) -> proofs.SignedCall | None:
        """Return the call to prove an answer to, for which its token may be revoked meanwhile; None if it is not signed
        or its signature is not valid."""
        try:
            header = proofs.Signed.parse(authorization)
            return proofs.SignedCall(call, header, self._signer(call, header)[1]) if header is not None else None
        except UnauthenticatedError:
            return None

    def _signer(self, call: str, signed: proofs.Signed) -> tuple[Identity, bytes]:
        """Return the caller that signed, and its key. Raises UnauthenticatedError."""
        own = signed.id == proofs.NODE and self._node_secret
        if own and hmac.compare_digest(signed.proof, signed.mask(call, own)):
            return NODE if self.required else ANYBODY, own
        token = self.cache.known.tokens.get(signed.id)
        for digest in (token.digest, token.old_digest) if token is not None else ():
            shown = tokens.Secret(signed.id, signed.secret(call, digest))
            if token is not None and token.is_proven_by(shown, time.time()):
                return token.identity, digest.encode()
        raise UnauthenticatedError(tokens.NOT_GOOD)

    def admit(self, call: str, authorization: str) -> Identity:
        """Return the caller, which may make this call. Raises UnauthenticatedError, PermissionDeniedError."""
        who = None
        try:
            if rights.RIGHTS.get(call, rights.Right()).public:
                return PUBLIC
            who = self.who(call, authorization)
            rights.check(call, who)
            return who
        except (UnauthenticatedError, PermissionDeniedError) as error:
            self.audit.note(who, call, "", error)
            raise

    def allows(self, call: str, authorization: str) -> bool:
        """Return whether `admit` would admit the call; writes nothing to the audit log."""
        try:
            rights.check(call, self.who(call, authorization))
        except (UnauthenticatedError, PermissionDeniedError):
            return False
        return True

    def acting(self, who: Identity, on_behalf_of: str) -> Identity:
        """Return the identity that a call acts for. Raises PermissionDeniedError."""
        if not on_behalf_of or on_behalf_of == who.tenant:
            return who
        tenant = self.cache.known.tenants.get(on_behalf_of)
        if not who.speaks_for_others or tenant is None or tenant.removed:
            raise PermissionDeniedError(
                f"on behalf of {on_behalf_of[:80]!r}: got a token of {who}, expected an engine of the operator, and a "
                "tenant that there is"
            )
        return Identity(on_behalf_of, who.role, who.token)

    def is_good(self, tenant: str, token_id: str) -> bool:
        """Return whether a token is still valid for leases that were made with it."""
        if not token_id:
            return not self.required
        token = self.cache.known.tokens.get(token_id)
        return token is not None and not token.revoked and token.tenant == tenant

    def changed(self, who: Identity, call: str, subject: str, error: LoraServerError | None = None) -> None:
        """Audit a change, or the error that prevented it, before its call is answered. Raises nothing."""
        self.audit.note(who, call, subject, error)
        self.audit.flush()

    def close(self) -> None:
        """Stop refreshing and write the audit log. Idempotent."""
        self.cache.close()
        self.audit.flush()
