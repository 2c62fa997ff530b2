"""Lists come in pages, each of which fits in a message."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from google.protobuf.message import Message

from lora_server.wire import lora_server_pb2 as pb

LIST_BYTES = 1 << 20  # of a page, about; gRPC takes messages of 4 MiB
Reply = TypeVar("Reply", pb.ListAdaptersReply, pb.ListTokensReply, pb.ListTenantsReply)
Row = TypeVar("Row", bound=Message)


def all_pages(ask: Callable[[Any], Reply], request: Callable[..., Any] = pb.ListAdaptersRequest) -> Reply:
    """Return all pages in one list; each is one call of `ask`, which may raise."""
    reply = ask(request())
    token = reply.next_page_token
    while token:
        page = ask(request(page_token=token))
        reply.MergeFrom(page)
        token = page.next_page_token
    reply.next_page_token = ""
    return reply


def fitting(rows: Iterable[Row]) -> list[Row]:
    """Return the first items, as many as fit in a page, at least one."""
    page, nbytes = list[Row](), 0
    for row in rows:
        nbytes += row.ByteSize()
        if page and nbytes > LIST_BYTES:
            break
        page.append(row)
    return page
