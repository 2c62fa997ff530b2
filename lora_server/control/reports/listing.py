"""The list of adapters, page by page: what is served and what was refused, by name, in messages that fit."""

from __future__ import annotations

from collections.abc import Callable

from lora_server.control.adapters.listings import AdapterListings, Listing
from lora_server.control.adapters.places import ListPlace
from lora_server.control.adapters.records import Record
from lora_server.control.adapters.refusals import RefusedAdapter
from lora_server.errors import ProtocolError
from lora_server.wire import lora_server_pb2 as pb
from lora_server.wire.listing import LIST_BYTES

MAX_PAGE = 1000  # adapters


def page(
    listings: AdapterListings, token: str, most: int = 0, sees: Callable[[str], bool] = lambda name: True
) -> pb.ListAdaptersReply:
    """Return the page that follows a page token, of at most `most` adapters; raises ProtocolError for a bad token."""
    most = min(most or MAX_PAGE, MAX_PAGE)
    entries = listings.after(_place(token), most + 1, sees)
    reply, nbytes, last = pb.ListAdaptersReply(), 0, ("", 0)
    for number, (place, entry) in enumerate(entries):
        if number == most or nbytes > LIST_BYTES:
            reply.next_page_token = f"{last[1]}:{last[0]}"
            break
        if isinstance(entry, Listing):
            reply.adapters.append(adapter(entry))
            nbytes += reply.adapters[-1].ByteSize()  # that of the whole reply costs more with each entry
        else:
            reply.refused.append(refusal(entry))
            nbytes += reply.refused[-1].ByteSize()
        last = place
    return reply


def _place(token: str) -> ListPlace:
    handle, _, name = token.partition(":")
    try:
        return (name, int(handle)) if token else ("", 0)
    except ValueError:
        raise ProtocolError(f"page_token: got {token[:100]!r}, expected a reply's next_page_token, or none") from None


def adapter(listing: Listing) -> pb.Adapter:
    """Return the message of a listing."""
    record = listing.record
    return pb.Adapter(
        name=record.name,
        version=record.version,
        handle=record.handle,
        uri=record.uri or record.path,
        lora_rank=record.lora_rank,
        bytes=record.nbytes,
        state=listing.state,
        resident_layers=listing.resident_layers,
        layers=listing.layers,
        warnings=listing.warnings,
        error=listing.error,
        holders=listing.holders,
        invocation=invocation(record),
        slo_class=listing.slo_class,
        pinned=record.pinned and listing.state != "draining",
    )


def invocation(record: Record) -> pb.Invocation | None:
    """Return the message of an activated LoRA's invocation; None for other adapters."""
    if record.invocation is None:
        return None
    return pb.Invocation(tokens=record.invocation.tokens, text=record.invocation.text)


def refusal(one: RefusedAdapter) -> pb.Refusal:
    """Return the message of a refusal."""
    return pb.Refusal(name=one.name, uri=one.uri, code=one.code, reason=one.reason)
