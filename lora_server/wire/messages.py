"""Small control messages (msgpack, typed by msgspec) beside the slots; never pickle."""

from __future__ import annotations

import hmac
import secrets
from typing import Annotated, Literal, TypeVar, cast

import msgspec

from lora_server.errors import ProtocolError, rebuild

MAX_MESSAGE_BYTES = 64 * 1024
NONCE_BYTES = 32

Nonce = Annotated[bytes, msgspec.Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]


class Hello(msgspec.Struct, tag="hello", forbid_unknown_fields=True):
    """The first message of a client to a shard: the lease that it holds."""

    client: int
    epoch: int
    key: bytes
    device: bool = False  # a GPU stores the client's signals and rings no bell; Mapped comes before the first step
    mirror: bool = False  # the client wants its rows in the shard's GPU memory
    slots: bool = False  # the client wants whole slots there, which the shard's kernel serves
    generation: int = 1  # of the placement that the client was told


class Welcome(msgspec.Struct, tag="welcome", forbid_unknown_fields=True):
    """A shard's answer to Hello: the sizes of their region, and where a mirror of it can be had."""

    depth: int
    request_bytes: int
    response_bytes: int
    table_bytes: int = 0
    mirror: Literal["", "fd", "ipc", "slots"] = ""  # by the third descriptor, by `handle`, or not at all
    handle: bytes = b""
    why: str = ""  # why there is no mirror
    pinned: bool = False  # a GPU reads and writes the region: its pages have to stay
    proof: bytes = b""  # over TCP: the shard, too, knows the lease


class Challenge(msgspec.Struct, tag="challenge", forbid_unknown_fields=True):
    """The first message of a shard over TCP: asks for the proof of a lease."""

    nonce: Nonce


class Answer(msgspec.Struct, tag="answer", forbid_unknown_fields=True):
    """The proof, without the key; `nonce` is for the shard to answer, that it is the one that knows the lease."""

    client: int
    epoch: int
    nonce: Nonce
    proof: bytes
    generation: int = 1  # see Hello

    @classmethod
    def to(cls, challenge: Challenge, hello: Hello) -> Answer:
        """Return the answer of the client with the lease of a Hello."""
        nonce = secrets.token_bytes(NONCE_BYTES)
        proven = proof(hello.key, b"client", challenge.nonce, nonce)
        return cls(hello.client, hello.epoch, nonce, proven, hello.generation)


def proof(key: bytes, role: bytes, theirs: bytes, own: bytes) -> bytes:
    """Prove that the side with this `role` knows the key: an HMAC-SHA256 that holds for this pair of nonces alone."""
    return hmac.digest(key, role + theirs + own, "sha256")


def proves(said: bytes, key: bytes, role: bytes, theirs: bytes, own: bytes) -> bool:
    """Return whether `said` is what `proof` returns for the same arguments."""
    return hmac.compare_digest(said, proof(key, role, theirs, own))


def badge_of(leaders: bytes, shard: int) -> bytes:
    """Return a follower's badge, derived from its leader's, which only the leader and the controller know."""
    return hmac.digest(leaders, b"badge of shard %d" % shard, "sha256")


class Mapped(msgspec.Struct, tag="mapped", forbid_unknown_fields=True):
    """A client with a device, after the Welcome: steps may come from now on, rows in the mirror or in the slots.

    Where whole slots lie in the shard's memory, its own memory, for answers, comes along as a descriptor.
    """

    mirror: bool


class Refused(msgspec.Struct, tag="refused", forbid_unknown_fields=True):
    """A shard's other answer to Hello."""

    code: str
    message: str


class Follow(msgspec.Struct, tag="follow", forbid_unknown_fields=True):
    """A shard to its leader, in answer to a Challenge: it knows its badge."""

    shard: int
    nonce: Nonce
    proof: bytes


class Lead(msgspec.Struct, tag="lead", forbid_unknown_fields=True):
    """A leader's answer: it knows the badge too."""

    proof: bytes


class Numbers(msgspec.Struct, tag="numbers", forbid_unknown_fields=True):
    """A shard to its leader, on a Unix socket: where numbers of steps go is the descriptor that comes along."""

    shard: int
    badge: bytes


class Order(msgspec.Struct, tag="order", forbid_unknown_fields=True):
    """Leader mode: the leader tells its stage which step comes next."""

    client: int
    epoch: int
    seq: int
    budget_us: int


_T = TypeVar("_T")


def encode(message: msgspec.Struct) -> bytes:
    """Return a message as bytes."""
    return msgspec.msgpack.encode(message)


def decode(data: bytes, expected: type[_T]) -> _T:
    """Return a message of an expected type; raises ProtocolError for any other."""
    return cast(_T, _decode(data, expected))


def decode_welcome(data: bytes) -> Welcome:
    """Return a shard's Welcome; raises the error that a Refused carries."""
    answer = cast(Welcome | Refused, _decode(data, Welcome | Refused))
    if isinstance(answer, Refused):
        raise rebuild(answer.code, answer.message)
    return answer


def _decode(data: bytes, expected: object) -> object:
    if len(data) > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"control message: got {len(data)} bytes, expected at most {MAX_MESSAGE_BYTES}")
    try:
        return msgspec.msgpack.decode(data, type=cast(type[object], expected))
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ProtocolError(f"control message: {error}; expected {expected}") from error
