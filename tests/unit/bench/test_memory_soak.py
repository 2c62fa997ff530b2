"""A real server with more adapters than memory, under several engines, and its shard killed while it loads."""

from __future__ import annotations

import argparse

from bench import memory_soak


def test_every_answer_is_right_with_little_memory_and_a_shard_that_is_killed():
    """The short form of bench.memory_soak, which has the bars."""
    options = {"adapters": 60, "pool": 8, "host_pool": 6, "engines": 2, "steps": 600, "kills": 2, "seed": 3}
    found = memory_soak.measure(argparse.Namespace(**options, calm=0.0, eviction="value"))
    assert found["wrong"] == 0 and found["steps"] >= 600
    assert len(found["kills"]) == found["restarts"] == 2
    assert set(found["errors"]) <= {"step", "shard_unavailable", "server_unavailable"}, found["errors_text"]
    assert 0 < found["pool_used_mb"] <= found["pool_mb"]
    assert found["leases_left"] == found["holders_left"] == found["failed"] == 0
