"""Proofs that a caller knows a secret, so that no call sends it: an impostor of the server learns nothing.

A client's lease key and a shard's name sign messages. Without TLS, a token and the secret of a node sign calls in their
header, `Signed ID TIME NONCE DIGEST PROOF`: PROOF of a token is its secret, encrypted with the digest of it that the
server keeps, so that neither the registry's content nor the header alone is worth anything. By the same digest, or the
node's secret, the server proves its answer to such a call: a client believes no process that has only its port.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from google.protobuf.message import Message

from lora_server.errors import UnauthenticatedError

SCHEME, NODE = "Signed", "node"
ANSWER_KEY = "lora-answer-proof"  # of a call's trailing metadata
SECONDS = 60.0  # how far clocks of hosts may differ
MOST_BEHIND = 4096  # a call that so many later ones overtook is refused


class Counts:
    """Numbers of a caller's calls that were accepted: none is accepted twice. Thread-safe."""

    def __init__(self) -> None:
        self._highest, self._taken = 0, 0  # a bit for each of the last counts, the lowest for the highest
        self._lock = threading.Lock()

    def take(self, count: int) -> bool:
        """Return whether a number is new, and accept it."""
        with self._lock:
            ahead = count - self._highest
            if ahead > 0:
                self._highest, older = count, self._taken << ahead if ahead < MOST_BEHIND else 0
                self._taken = (older | 1) & ((1 << MOST_BEHIND) - 1)
                return True
            if -ahead >= MOST_BEHIND or self._taken >> -ahead & 1:
                return False
            self._taken |= 1 << -ahead
            return True


def sign(request: Any, proof: Message, key: bytes) -> None:
    """Put a Proof or ShardProof on a request, by the key of the caller that it names."""
    request.proof.CopyFrom(proof)
    request.proof.mac = _mac(request, key)


def is_signed(request: Any, key: bytes) -> bool:
    """Return whether this key signed the whole request."""
    bare = type(request)()
    bare.CopyFrom(request)
    bare.proof.ClearField("mac")
    return hmac.compare_digest(request.proof.mac, _mac(bare, key))


def lend(key: bytes, client: int, epoch: int) -> bytes:
    """Return the proof by which a lease's holder lets another client use what it holds."""
    return hmac.digest(key, f"borrow {client} {epoch}".encode(), "sha256")


def _mac(request: Message, key: bytes) -> bytes:
    said = request.DESCRIPTOR.full_name.encode() + b"\0" + request.SerializeToString(deterministic=True)
    return hmac.digest(key, said, "sha256")


class Signed(NamedTuple):
    """A header; `id` is the token's, or NODE. `digest`: of the call's message."""

    id: str
    time: str
    nonce: str
    digest: str
    proof: bytes

    @classmethod
    def parse(cls, header: str) -> Signed | None:
        """Parse a header; None for another scheme. Raises UnauthenticatedError."""
        scheme, *parts = header.split(" ")
        if scheme != SCHEME:
            return None
        try:
            who, when, nonce, digest, proof = parts
            float(when)
            return cls(who, when, nonce, digest, base64.urlsafe_b64decode(proof))
        except ValueError:
            raise UnauthenticatedError(
                "authorization: got a signature that is incomplete; expected five parts"
            ) from None

    def __str__(self) -> str:
        return " ".join((SCHEME, *self[:-1], base64.urlsafe_b64encode(self.proof).decode()))

    def mask(self, call: str, key: bytes) -> bytes:
        """Return 64 bytes that only the key's holder can compute, for this call alone."""
        return hmac.digest(key, "\0".join((call, *self[:-1])).encode(), "sha512")

    def secret(self, call: str, digest: str) -> str:
        """Return the token's secret, if `digest` is the token's; otherwise noise."""
        return _xor(self.proof, self.mask(call, digest.encode())).decode("latin-1")


class SignedCall(NamedTuple):
    """A call, Service/Method, and its header; `key`, a token's digest or the node's secret, proves the answer."""

    call: str
    header: Signed
    key: bytes

    def __str__(self) -> str:
        return str(self.header)

    def prove(self, said: bytes) -> str:
        """Return the proof that `said`, of `reply` or `refusal`, is the server's answer to this call."""
        call = "\0".join(("answer", self.call, *self.header[:-1], ""))
        return hmac.digest(self.key, call.encode() + said, "sha256").hex()

    def is_proven(self, proof: str, said: bytes) -> bool:
        """Return whether `said` is the server's answer to this call."""
        return hmac.compare_digest(proof.encode(), self.prove(said).encode())


def sign_call(who: str, secret: str, call: str, message: bytes) -> SignedCall:
    """Sign a call, Service/Method, by a token or (NODE) as a process of the server."""
    unsigned = Signed(who, f"{time.time():.3f}", secrets.token_hex(8), hashlib.sha256(message).hexdigest(), b"")
    if who == NODE:
        key = secret.encode()
        return SignedCall(call, unsigned._replace(proof=unsigned.mask(call, key)), key)
    key = hashlib.sha256(secret.encode()).hexdigest().encode()
    return SignedCall(call, unsigned._replace(proof=_xor(secret.encode(), unsigned.mask(call, key))), key)


def reply(message: Message | bytes) -> bytes:
    """Return the bytes of a reply that `SignedCall.prove` proves."""
    return b"reply\0" + (message if isinstance(message, bytes) else message.SerializeToString(deterministic=True))


def refusal(code: str, text: str) -> bytes:
    """Return the bytes of an error that it proves."""
    return f"error\0{code}\0{text}".encode()


def check_message(header: str, message: bytes) -> None:
    """Raise UnauthenticatedError for a message that its call's header does not sign."""
    signed = Signed.parse(header)
    if signed is not None and not hmac.compare_digest(signed.digest, hashlib.sha256(message).hexdigest()):
        raise UnauthenticatedError("authorization: got the signature of another message")


class Freshness:
    """Signatures of calls are good once, and for a while. Thread-safe."""

    def __init__(self, seconds: float = SECONDS, now: Callable[[], float] = time.time) -> None:
        self._seconds, self._now = seconds, now
        self._seen: dict[str, float] = {}  # oldest first
        self._lock = threading.Lock()

    def check(self, signed: Signed) -> None:
        """Accept a valid signature once. Raises UnauthenticatedError."""
        now = self._now()
        late = now - float(signed.time)
        if not abs(late) <= self._seconds:
            raise UnauthenticatedError(
                f"authorization: got a signature that is {late:.0f} s old, expected {self._seconds:g} s at most: set "
                "the clocks of both hosts, or use TLS"
            )
        with self._lock:
            while self._seen and now - next(iter(self._seen.values())) > 2 * self._seconds:
                del self._seen[next(iter(self._seen))]
            if signed.nonce in self._seen:
                raise UnauthenticatedError("authorization: got a signature that was used before")
            self._seen[signed.nonce] = now


def _xor(text: bytes, mask: bytes) -> bytes:
    return bytes(one ^ other for one, other in zip(text, mask, strict=False))
