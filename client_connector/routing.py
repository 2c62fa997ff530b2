"""Routes the rows of a batch of adapters to shards, as messages.

Shapes: T rows of the engine's activations, k experts per row; R row segments (row, adapter, weight), sorted by handle
once per engine step: a row has one, of weight 1, or several. In one message: N entries, one per row segment and expert,
in S segments; M rows; P pairs (row, expert), which are its entries where each row has one row segment.

A message is what one shard gets in one push. Rows that no adapter touches never leave the engine;
gate_up rows travel once per shard however many of its experts they meet; `down` comes back summed
per token. Chunks are cut at rows, so that everything of a row on a shard travels together, and each row once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from lora_server.placement import Placement
from lora_server.spec import Site
from lora_server.wire.terms import Held

Ints = npt.NDArray[np.int32]


class Message(NamedTuple):
    """One push to one shard. A message without rows only keeps a stage in step (leader mode)."""

    shard: int
    segments_S4: Ints  # handle, expert, first entry, entries
    rows_M: torch.Tensor  # int64, on a device int32: the engine rows it concerns, each once
    map_N: torch.Tensor | None  # int32: entry -> position in rows_M; None where entry i is row i
    pairs_P: torch.Tensor  # as rows_M: row * k + place among the row's experts, each once
    pair_N: torch.Tensor | None = None  # int32: entry -> position in pairs_P; None where entry i is pair i
    weights_N: torch.Tensor | None = None  # float32, of the entries' row segments; None where all are 1


EMPTY = torch.empty(0, dtype=torch.int64)
NO_SEGMENTS = np.empty((0, 4), np.int32)


def empty_message(shard: int) -> Message:
    """Make a message without rows, with which the peers of a stage count the same steps."""
    return Message(shard, NO_SEGMENTS, EMPTY, None, EMPTY)


class Tables(NamedTuple):
    """A batch on a device. directory: (handle, 0, 1) per adapter, so that segments name (handle, expert)."""

    rows_R: torch.Tensor  # int32
    adapters_T: torch.Tensor  # int32: row of `directory`, or -1
    directory: torch.Tensor  # int32 [adapters, 3]


def _sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy to a device without waiting for it."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


class Run(NamedTuple):
    """Consecutive engine rows of one sequence; each gets the sum of its segments, weight times the adapter's delta."""

    segments: tuple[tuple[Held, float], ...]
    first: int
    rows: int

    @classmethod
    def of(cls, held: Held, first: int, rows: int) -> Run:
        """Make a run of rows of one adapter."""
        return cls(((held, 1.0),), first, rows)


@dataclass(frozen=True)
class Batch:
    """The adapters of one engine step. rows_R: int64 engine rows sorted by handle; handles_R: their handles.

    weights_R: float32; None if each row is there once, with weight 1.
    """

    rows_R: torch.Tensor
    handles_R: torch.Tensor
    held: tuple[Held, ...]
    decode: bool
    weights_R: torch.Tensor | None = None
    _parts: dict[tuple[Held, ...], Batch | None] = field(default_factory=dict, compare=False)
    _tables: dict[tuple[torch.device, int], Tables] = field(default_factory=dict, compare=False)
    _dense: dict[tuple[int, int, torch.device | None], list[Message]] = field(default_factory=dict, compare=False)

    @classmethod
    def of(cls, runs: Sequence[Run], decode: bool, keep_T: torch.Tensor | None = None) -> Batch | None:
        """Make a batch of disjoint runs; rows outside `keep_T` (bool) are left out. None without rows."""
        parts = [(held, weight, run) for run in runs if run.rows > 0 for held, weight in run.segments]
        if not parts:
            return None
        parts.sort(key=lambda part: part[0].handle)
        counts = [run.rows for _, _, run in parts]
        rows_R = np.concatenate([np.arange(run.first, run.first + run.rows) for _, _, run in parts])
        handles_R = np.repeat(np.array([held.handle for held, _, _ in parts], np.int64), counts)
        weights_R = None
        if any(weight != 1.0 or len(run.segments) > 1 for _, weight, run in parts):
            weights = np.array([weight for _, weight, _ in parts], np.float32)
            weights_R = torch.from_numpy(weights.repeat(counts))
        held = tuple({held.handle: held for held, _, _ in parts}.values())
        batch = cls(torch.from_numpy(rows_R), torch.from_numpy(handles_R), held, decode, weights_R)
        return batch if keep_T is None else batch._kept(keep_T[batch.rows_R], held)

    def _kept(self, keep_R: torch.Tensor, held: tuple[Held, ...]) -> Batch | None:
        if not bool(keep_R.any()):
            return None
        weights = None if self.weights_R is None else self.weights_R[keep_R]
        return Batch(self.rows_R[keep_R], self.handles_R[keep_R], held, self.decode, weights)

    def at(self, site: Site, pass_rows_T: torch.Tensor | None = None) -> Batch | None:
        """Return the rows of adapters that have a delta at `site`, as a batch; None if there are none.

        `pass_rows_T`: int64, where the site's rows are not those of the pass. Its row t is row `pass_rows_T[t]` of the
        pass, or none of it (-1); a row of the pass may be there several times, or not at all.
        """
        batch = self._at(site)
        return batch if batch is None or pass_rows_T is None else batch._spread(pass_rows_T.cpu())

    def _at(self, site: Site) -> Batch | None:
        inside = [held for held in self.held if site in held.sites]
        if not inside:
            return None
        if len(inside) == len(self.held):
            return self
        part = tuple(inside)
        if part not in self._parts:
            keep = torch.isin(self.handles_R, torch.tensor([held.handle for held in inside]))
            self._parts[part] = self._kept(keep, part)
        return self._parts[part]

    def _spread(self, pass_rows_T: torch.Tensor) -> Batch | None:
        sorted_T, order_T = torch.sort(pass_rows_T, stable=True)
        first_R = torch.searchsorted(sorted_T, self.rows_R)
        count_R = torch.searchsorted(sorted_T, self.rows_R, right=True) - first_R
        of_N = torch.arange(len(self.rows_R)).repeat_interleave(count_R)
        nth_N = torch.arange(len(of_N)) - (count_R.cumsum(0) - count_R)[of_N]
        rows_N = order_T[first_R[of_N] + nth_N]
        weights_N = None if self.weights_R is None else self.weights_R[of_N]
        return Batch(rows_N, self.handles_R[of_N], self.held, self.decode, weights_N) if len(of_N) else None

    def on(self, device: torch.device, num_rows: int) -> Tables:
        """Copy the batch, of rows with one adapter each, to a device, once, for activations of `num_rows` rows."""
        if (device, num_rows) not in self._tables:
            self._tables[device, num_rows] = self._on(device, num_rows)
        return self._tables[device, num_rows]

    def _on(self, device: torch.device, num_rows: int) -> Tables:
        assert self.weights_R is None, "a table has one adapter per row"
        handles, index_R = torch.unique_consecutive(self.handles_R, return_inverse=True)
        adapters_T = torch.full((num_rows,), -1, dtype=torch.int32)
        adapters_T[self.rows_R] = index_R.int()
        directory = torch.zeros(len(handles), 3, dtype=torch.int32)
        directory[:, 0], directory[:, 2] = handles.int(), 1
        return Tables(*(_sent(tensor, device) for tensor in (self.rows_R.int(), adapters_T, directory)))


def route_dense(batch: Batch, shard: int, max_entries: int, rows_R: torch.Tensor | None = None) -> list[Message]:
    """Route a site with one weight for every row: a row's pair is the row. rows_R: the batch's, on a device.

    The sites of a pass that have one owner share their messages.
    """
    key = (shard, max_entries, None if rows_R is None else rows_R.device)
    if key not in batch._dense:
        batch._dense[key] = _route_dense(batch, shard, max_entries, batch.rows_R if rows_R is None else rows_R)
    return batch._dense[key]


def _route_dense(batch: Batch, shard: int, max_entries: int, rows_R: torch.Tensor) -> list[Message]:
    messages = []
    for part in _parts(batch, max_entries):
        rows = rows_R[part]
        handles, counts = torch.unique_consecutive(batch.handles_R[part], return_counts=True)
        segments = _segments(handles, 0, counts)
        if batch.weights_R is None:
            messages.append(Message(shard, segments, rows, None, rows))
        else:
            messages.append(_weighted(shard, segments, rows, rows, batch.weights_R[part]))
    return messages


def _parts(batch: Batch, most: int) -> list[slice | torch.Tensor]:
    """Cut a batch into parts of at most `most` row segments, each in the batch's order.

    The segments of a row are in one part, unless there are more than `most`: then the row travels several times.
    """
    num = len(batch.rows_R)
    if batch.weights_R is None or num <= most:
        return [slice(first, first + most) for first in range(0, num, most)]
    rows_R, order_R = torch.sort(batch.rows_R, stable=True)
    ends = np.append(np.flatnonzero(np.diff(rows_R.numpy())) + 1, num)  # of the rows
    parts: list[slice | torch.Tensor] = []
    first = 0
    while first < num:
        fitting = ends[np.searchsorted(ends, first, "right") : np.searchsorted(ends, first + most, "right")]
        end = int(fitting[-1]) if len(fitting) else first + most
        parts.append(order_R[first:end].sort().values)
        first = end
    return parts


def _weighted(
    shard: int, segments_S4: Ints, row_N: torch.Tensor, pair_N: torch.Tensor, weights_N: torch.Tensor
) -> Message:
    """Make a message of entries that share rows and pairs: each of these is sent, or comes back, once."""
    rows_M, map_N = torch.unique(row_N, return_inverse=True)
    pairs_P, place_N = torch.unique(pair_N, return_inverse=True)
    return Message(shard, segments_S4, rows_M, map_N.int(), pairs_P, place_N.int(), weights_N)


def route_experts(batch: Batch, experts_Tk: torch.Tensor, owners_E: torch.Tensor, max_entries: int) -> list[Message]:
    """Route an expert site, by shard, then chunk. experts_Tk: int64; E or more means no expert.

    owners_E: int64 shard of each expert. Within a message entries are sorted by (handle, expert, row).
    """
    top_k = experts_Tk.shape[1]
    num_rows, num_experts = len(batch.rows_R), len(owners_E)
    expert_F = experts_Tk[batch.rows_R].reshape(-1)
    row_F = torch.arange(num_rows).repeat_interleave(top_k)
    kept_F = torch.nonzero(expert_F < num_experts).squeeze(1)
    expert_F, row_F = expert_F[kept_F], row_F[kept_F]
    pair_F = (batch.rows_R[:, None] * top_k + torch.arange(top_k)).reshape(-1)[kept_F]
    parts, chunk_R = _parts(batch, max(1, max_entries // top_k)), torch.empty(num_rows, dtype=torch.int64)
    for chunk, part in enumerate(parts):
        chunk_R[part] = chunk
    group_F = owners_E[expert_F] * len(parts) + chunk_R[row_F]
    # rows are sorted by handle, so sorting by (group, handle, expert) keeps rows in order within a segment
    handles, rank_R = torch.unique_consecutive(batch.handles_R, return_inverse=True)
    key_F = (group_F * len(handles) + rank_R[row_F]) * num_experts + expert_F
    key_F, order = torch.sort(key_F, stable=True)
    sizes = torch.unique_consecutive(group_F[order], return_counts=True)[1]
    messages, first = [], 0
    for size in sizes.tolist():
        part = order[first : first + size]
        keys, counts = torch.unique_consecutive(key_F[first : first + size], return_counts=True)
        segments = _segments(handles[keys // num_experts % len(handles)], keys.numpy() % num_experts, counts)
        shard = int(owners_E[expert_F[part[0]]])
        if batch.weights_R is None:
            rows, positions = torch.unique(row_F[part], return_inverse=True)
            messages.append(Message(shard, segments, batch.rows_R[rows], positions.int(), pair_F[part]))
        else:
            of_N = row_F[part]
            weights = batch.weights_R[of_N]
            messages.append(_weighted(shard, segments, batch.rows_R[of_N], pair_F[part], weights))
        first += size
    return messages


def _segments(handle_S: torch.Tensor, expert_S: npt.NDArray[np.int64] | int, count_S: torch.Tensor) -> Ints:
    """Return [S, 4]. NumPy, because its calls cost less than torch's for the few segments of a decode step."""
    segments_S4, entries_S = np.empty((len(count_S), 4), np.int32), count_S.numpy()
    segments_S4[:, 0], segments_S4[:, 1] = handle_S.numpy(), expert_S
    segments_S4[:, 2], segments_S4[:, 3] = entries_S.cumsum() - entries_S, entries_S
    return segments_S4


def probe_messages(placement: Placement, site: Site, handle: int) -> list[Message]:
    """Make messages of one row, through one expert of each shard of the stage that has some of the site."""
    row = torch.zeros(1, dtype=torch.int64)
    own = {shard: placement.experts(site, shard) for shard in placement.layout.stage_shards(site.layer)}
    return [
        Message(shard, np.array([(handle, experts[0], 0, 1)], np.int32), row, None, row)
        for shard, experts in own.items()
        if len(experts)
    ]


def in_step(messages: Sequence[Any], stage: range) -> list[Any]:
    """Pad with empty messages: in leader mode every shard of the stage gets the same number.

    Chunks that a device routes are as many for each already.
    """
    by_shard = {shard: [m for m in messages if m.shard == shard] for shard in stage}
    longest = max(len(own) for own in by_shard.values())
    for shard, own in by_shard.items():
        own.extend(empty_message(shard) for _ in range(longest - len(own)))
    return [message for own in by_shard.values() for message in own]
