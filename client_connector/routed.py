"""Routes the expert sites of an engine on its GPU, so that no site waits for the host to read the routing.

The host knows which rows have adapters, and cuts chunks by tokens so that any routing fits a message. How many
entries a shard gets, which rows, and in which order, only the device knows, until the answer is there.
Every shard of the stage gets every chunk, if only an empty one.

Shapes: T rows of the engine's activations, k experts per row, E experts; see routing.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from typing_extensions import override

from client_connector.packing import Packer
from client_connector.routing import NO_SEGMENTS, Batch, Message
from kernels_cuda.routing import MAX_KEYS, MAX_PAIRS, Choice
from lora_server.placement import Placement
from lora_server.spec import Site
from lora_server.transport.base import Link
from lora_server.wire import slot
from lora_server.wire.slot import RequestHeader


class RoutedChunk(NamedTuple):
    """One push to one shard: tokens [first, first + tokens) of the engine's rows."""

    shard: int
    first: int
    choice: Choice


def fits(batch: Batch, num_experts: int) -> bool:
    """Return whether the kernel can route it: rows with one adapter each, not too many (adapter, expert) pairs."""
    return batch.weights_R is None and len(batch.held) * num_experts < MAX_KEYS


def chunks_of(
    batch: Batch,
    placement: Placement,
    site: Site,
    experts_Tk: torch.Tensor,
    weights_Tk: torch.Tensor | None,
    max_entries: int,
) -> list[RoutedChunk]:
    """List chunks by shard, all tensors on the device. Expert ids outside a shard's range are dropped there."""
    tokens, top_k = experts_Tk.shape
    _, adapters_T, directory = batch.on(experts_Tk.device, tokens)
    experts_Tk = experts_Tk.int().contiguous()
    size = max(1, min(max_entries, MAX_PAIRS) // top_k)
    chunks = []
    for shard in placement.layout.stage_shards(site.layer):
        own = placement.experts(site, shard)
        for first in range(0, tokens, size):
            part = slice(first, first + size)
            weights = None if weights_Tk is None else weights_Tk[part]
            choice = Choice(experts_Tk[part], weights, adapters_T[part], directory, placement.spec.experts, own)
            chunks.append(RoutedChunk(shard, first, choice))
    return chunks


class RoutedPacker(Packer[RoutedChunk]):
    """One expert site of one engine step; x [T, K], or, by entry, [T * k, K]."""

    @override
    def write_request(self, link: Link, seq: int, message: RoutedChunk, budget_us: int) -> RequestHeader:
        """Write the header without its counts, which the device adds."""
        by_pair, (tokens, top_k) = self.given.by_pair, message.choice.experts_Tk.shape
        header = self.header(link, seq, slot.HAS_OUT_MAP if by_pair else slot.HAS_IN_MAP, budget_us)
        header.pack_into(link.region.request(seq))
        per_token = top_k if by_pair else 1
        x = self.x[message.first * per_token : (message.first + tokens) * per_token]
        link.put_routed(header, x, message.choice, by_pair)
        return header

    @override
    def settled(self, link: Link, message: RoutedChunk, sent: RequestHeader) -> tuple[Message, RequestHeader]:
        """Read the counts that the device wrote; rows and entries stay there."""
        sent = RequestHeader.unpack_from(link.region.request(sent.seq))
        route, top_k = link.routed(sent.seq), message.choice.experts_Tk.shape[1]
        assert route.token_M is not None
        rows = sent.num_out_rows if self.given.by_pair else sent.num_rows
        rows_M = route.token_M[:rows].long() + message.first
        pairs_P = route.pair_N[: sent.num_entries].long() + message.first * top_k
        return Message(message.shard, NO_SEGMENTS, rows_M, route.row_N, pairs_P), sent
