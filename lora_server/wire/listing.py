"""The list of adapters comes in pages."""

from __future__ import annotations

from collections.abc import Callable

from lora_server.wire import lora_server_pb2 as pb


def all_pages(ask: Callable[[pb.ListAdaptersRequest], pb.ListAdaptersReply]) -> pb.ListAdaptersReply:
    """All of them in one; each is one call of `ask`, whose errors come through."""
    reply = ask(pb.ListAdaptersRequest())
    token = reply.next_page_token
    while token:
        page = ask(pb.ListAdaptersRequest(page_token=token))
        reply.MergeFrom(page)
        token = page.next_page_token
    reply.next_page_token = ""
    return reply
