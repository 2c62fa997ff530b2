"""Bounds of requests: one check for every field of every request, and a table of fields with other bounds.

The server stores the content of requests, sends it to shards, and gets it back from them when its controller restarts.
So content that passes here must fit all of these messages: tests/unit/access/test_bounds.py sends the largest of every
RPC.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Any, NamedTuple

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from lora_server.errors import ConfigError

REQUEST_BYTES = 4 << 20  # of one message to the server, a shard's report included
MESSAGE_BYTES = 1 << 19  # of a message that many commands, or reports, of a shard share
KEPT_BYTES = 3 << 20  # of one command to a shard, which reports it to the next controller
REPLY_BYTES = 64 << 20  # of one message from the server; larger than a request, so that no stream breaks
MAX_NUMBER = 1 << 63  # what a database takes, exclusive


class Bound(NamedTuple):
    """Bounds of one field. `length`: characters of a string, bytes of a `bytes`; `items`: of a repeated field, added up
    over all parts of a request."""

    length: int = 200
    items: int = 1024
    printable: bool = True


DEFAULT = Bound()
URI, TICKETS, HANDLES = Bound(length=4096), Bound(items=16_384), Bound(items=65_536)
BOUNDS = {  # by message and field
    "AddAdapterRequest.uri": URI,
    "UpdateAdapterRequest.uri": URI,
    **dict.fromkeys((f"List{what}Request.page_token" for what in ("Adapters", "Tokens", "Tenants")), Bound(length=256)),
    "JoinRequest.served_names": Bound(items=64),
    "AcquireRequest.names": Bound(length=265),  # NAME@DIGEST
    "HeartbeatRequest.settled": TICKETS,
    "AwaitRequest.tickets": TICKETS,
    "CancelRequest.tickets": TICKETS,
    "ReleaseRequest.handles": HANDLES,
    "RestoreRequest.handles": HANDLES,
    "HoldEntry.request": Bound(length=64),
    "HoldEntry.traceparent": Bound(length=64),
    "ReadRequest.name": Bound(length=255),  # a file's
    "Registration.gone": HANDLES,
    "Registration.active": Bound(items=1 << 18),
    "Refusals.refusals": Bound(length=2 << 20),
    "ShardsFailed.reason": Bound(length=4096),
    "Endpoint.shm": URI,
    "Endpoint.certificate": Bound(length=64 << 10),
}


def fits(name: str) -> bool:
    """Return whether a request may carry this text in a field without an entry in the table."""
    return len(name) <= DEFAULT.length and name.isprintable()


def check(request: Message) -> None:
    """Raise ConfigError for the first field out of bounds: a text too long or with control characters, too many items,
    or a number that is not finite, or 2^63 and above."""
    _check(request, Counter())


def _check(message: Message, items: Counter[str]) -> None:
    for field, value in message.ListFields():
        where = f"{message.DESCRIPTOR.name}.{field.name}"
        bound = BOUNDS.get(where, DEFAULT)
        values = value if field.is_repeated else (value,)
        if field.is_repeated:
            items[where] += len(values)
            if items[where] > bound.items:
                raise ConfigError(f"{where}: got {items[where]:,} items, expected at most {bound.items:,}; send fewer")
        if field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
            for one in values:
                _check(one, items)
        elif field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
            _check_texts(where, bound, values)
        else:
            _check_numbers(where, values)


def _check_texts(where: str, bound: Bound, values: Collection[Any]) -> None:
    for one in values:
        if len(one) > bound.length:
            what = "characters" if isinstance(one, str) else "bytes"
            raise ConfigError(f"{where}: got {len(one):,} {what}, expected at most {bound.length:,}; shorten it")
        if bound.printable and isinstance(one, str) and not one.isprintable():
            raise ConfigError(f"{where}: got {one[:80]!r}, expected printable characters; remove the others")


def _check_numbers(where: str, values: Collection[Any]) -> None:
    for one in values:
        if not -MAX_NUMBER < one < MAX_NUMBER:  # true of NaN, too
            raise ConfigError(f"{where}: got {one}, expected a finite number below 2^63")
