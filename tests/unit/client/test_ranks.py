"""Tensor-parallel ranks: columns against a plain count, and what real gloo processes tell each other."""

import dataclasses
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from multiprocessing import get_context

import pytest
from torch import distributed

from client_connector.serving.modules import rank_window
from client_connector.serving.plan import RETRY, Failure
from client_connector.serving.ranks import RankGroup
from lora_server.spec import Site
from tests.support.workload import workload

RANKS = 3
OWN, VOID = Failure("adapter_load", "adapter 'law': broken"), Failure(RETRY, "")
SECONDS = 120


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_each_column_is_on_one_rank_and_each_key_head_on_its_replicas(size):
    """With two key heads the ranks beyond the second have replicas of them."""
    spec = dataclasses.replace(workload("llama").spec, heads=8, kv_heads=2, ffn=64, dense_ffn=64)
    replicas = max(1, size // spec.kv_heads)
    for site in (Site(0, projection) for projection in ("qkv", "o", "gate_up", "down")):
        windows = [rank_window(spec, site, rank, size, replicas) for rank in range(size)]
        outs = Counter(column for window in windows for begin, end in window.out for column in range(begin, end))
        if site.projection in ("o", "down"):
            assert set(outs) == set(range(spec.out_width(site))) and set(outs.values()) == {size}
            assert [window.in_begin for window in windows] == [
                rank * spec.in_width(site) // size for rank in range(size)
            ]
            continue
        for section in spec.sections(site):
            times = replicas if section.name in ("k", "v") else 1
            assert {outs[column] for column in range(section.begin, section.end)} == {times}, section
        assert len(outs) == spec.out_width(site) and {window.in_begin for window in windows} == {0}


def as_rank(rank: int, address: str) -> dict[str, object]:
    """What one rank of three gets."""
    distributed.init_process_group(
        "gloo", init_method=address, rank=rank, world_size=RANKS, timeout=timedelta(seconds=SECONDS)
    )
    ranks = RankGroup(distributed.group.WORLD)
    seen = {
        "first": ranks.is_first,
        "told": ranks.from_first(lambda: {"by": rank}),
        "gathered": ranks.gather(rank * 10),
        "none failed": ranks.agree({}),
        "one failed": ranks.agree({"a": OWN} if rank == 2 else {}),
        "own before void": ranks.agree({"a": VOID, "b": VOID} if rank == 0 else {"a": OWN}),
    }
    distributed.destroy_process_group()
    return seen


def test_what_one_rank_decides_and_what_any_has_seen_is_known_on_each(tmp_path):
    address = f"file://{tmp_path}/ranks"
    with ProcessPoolExecutor(RANKS, mp_context=get_context("spawn")) as pool:
        seen = [one.result(SECONDS) for one in [pool.submit(as_rank, rank, address) for rank in range(RANKS)]]
    assert [one.pop("first") for one in seen] == [True, False, False]
    assert (
        seen
        == [
            {
                "told": {"by": 0},
                "gathered": [0, 10, 20],
                "none failed": {},
                "one failed": {"a": OWN},
                "own before void": {"a": OWN, "b": VOID},
            }
        ]
        * RANKS
    )


def test_a_single_rank_asks_none():
    ranks = RankGroup(None)
    assert ranks.is_first and ranks.from_first(lambda: 7) == 7
    assert ranks.gather(1) == [1] and ranks.agree({"a": VOID}) == {"a": VOID}
