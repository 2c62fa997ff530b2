"""Events of a server, framed as vLLM publishes KV events: a topic, an 8-byte big-endian sequence, a msgpack batch.

A topic is `kind/tenant/`; the operator's tenant is empty. The batches of a topic have consecutive sequences, which
begin after the epoch: the microsecond since 1970 at which the controller started. So no batch of a later controller
follows one of an earlier. A batch without events is a heartbeat; its sequence is that of its topic's last batch.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import msgspec

ADAPTER, RESIDENCY, ADMISSION, SHARD, ADVICE = KINDS = ("adapter", "residency", "admission", "shard", "advice")
MOST_IN_BATCH = 1000  # events
DEPTH = 10_000  # events of a kind that are kept for replay


class Event(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """Something that happened; its class is in the field `type`."""


class AdapterAdded(Event):
    """A name means a version now, and meant none before."""

    name: str
    version: str
    handle: int
    lora_rank: int
    bytes: int


class AdapterUpdated(AdapterAdded):
    """A name means another version now."""


class AdapterRemoved(Event):
    """A name means no version any more."""

    name: str
    version: str


class AdapterRefused(Event):
    """An adapter of --adapters is not served; `code` is the error's."""

    name: str
    code: str
    reason: str


class ResidencyChanged(Event):
    """The lowest tier in which all of an adapter is, see `Adapter.state` of the proto."""

    name: str
    version: str
    handle: int
    state: str


class RequestQueued(Event):
    """A request waits for a place for its adapters."""

    adapters: tuple[str, ...]
    client: int


class RequestAdmitted(Event):
    """A request that waited was admitted. Requests that did not wait have no event."""

    adapters: tuple[str, ...]
    client: int
    waited: float  # seconds


class ShardChanged(Event):
    """A shard registered (`up`), ended as it was asked to (`left`), or lost its stream (`lost`)."""

    shard: int
    node: int
    pid: int
    state: str


class ServerAdvice(Event):
    """What a router or an autoscaler should know: whether to send requests here, and how many wait."""

    ready: bool
    reason: str  # why it is not ready
    queued: int  # requests that wait for a place
    active: int  # adapters that clients hold


AnyEvent: TypeAlias = (
    AdapterAdded
    | AdapterUpdated
    | AdapterRemoved
    | AdapterRefused
    | ResidencyChanged
    | RequestQueued
    | RequestAdmitted
    | ShardChanged
    | ServerAdvice
)


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """Events of one topic; `ts` is in seconds since 1970. The fields are those of vLLM's batch."""

    ts: float
    events: list[AnyEvent]
    data_parallel_rank: int | None = None


class EventMessage(NamedTuple):
    """One batch as it is sent and kept; `size` is the number of its events."""

    topic: str
    sequence: int
    payload: bytes
    size: int

    def frames(self) -> tuple[bytes, bytes, bytes]:
        """Return the message's frames."""
        return self.topic.encode(), self.sequence.to_bytes(8, "big"), self.payload


def topic_of(kind: str, tenant: str) -> str:
    """Return a topic. The slash at its end keeps it from being the beginning of another."""
    return f"{kind}/{tenant}/"


encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(EventBatch).decode
