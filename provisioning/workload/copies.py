"""Copies of hot adapters, where each instance serves adapters of its own: an adapter with more load than an instance's
share gets several copies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np

from provisioning.arrays import Ints
from provisioning.workload.requests import Requests
from provisioning.workload.workload import Workload


def with_copies(workload: Workload, instances: int) -> Workload:
    """Copy each adapter once per instance's share of load; its calls go to the copies in turn.

    A copy counts as an adapter. Returns the workload itself if no adapter has more load than one share.
    """
    copies_N = np.maximum(np.ceil(workload.in_flight * instances - 1e-9), 1).astype(np.int64)
    if copies_N.max() == 1:
        return workload
    trace, generate = workload.trace, workload.generate
    return replace(
        workload,
        popularity=np.repeat(workload.popularity / copies_N, copies_N),
        tokens=None if workload.tokens is None else np.repeat(workload.tokens, copies_N),
        names=tuple(name for name, copies in zip(workload.names, copies_N, strict=False) for _ in range(copies)),
        trace=None if trace is None else in_turn(trace, copies_N),
        generate=None if generate is None else partial(_made, generate, copies_N),
    )


def in_turn(calls: Requests, copies_N: Ints) -> Requests:
    """Send the i-th call of an adapter to its copy i modulo their number."""
    first_N = np.cumsum(copies_N) - copies_N
    order = np.argsort(calls.adapter, kind="stable")
    counts_N = calls.counts()
    turn = np.empty(len(calls), dtype=np.int64)
    turn[order] = np.arange(len(calls)) - np.repeat(np.cumsum(counts_N) - counts_N, counts_N)
    adapter = first_N[calls.adapter] + turn % copies_N[calls.adapter]
    names = tuple(name for name, copies in zip(calls.names, copies_N, strict=False) for _ in range(copies))
    return replace(calls, adapter=adapter, num_adapters=int(copies_N.sum()), names=names)


def _made(generate: Callable[[int, int], Requests], copies_N: Ints, num: int, seed: int) -> Requests:
    return in_turn(generate(num, seed), copies_N)
