"""Plan and reality: the server admits at once whom `provision`'s simulation admits at once."""

from __future__ import annotations

import numpy as np
import pytest

from bench import admission, admission_cells
from provisioning.workload.workload import Workload, zipf

SCALE = admission_cells.Scale(load=10.0, hold_seconds=0.6, seconds=6.0)


@pytest.mark.parametrize(("adapters", "skew", "load", "slots"), [
    (512, 1.2, 256, 90), (128, 1.2, 64, 20), (128, 1.2, 64, 32), (64, 0.8, 40, 24), (64, 1.0, 20, 12),
])  # fmt: skip
def test_the_rule_admits_whom_the_simulation_admits(adapters, skew, load, slots):
    """In virtual time, at 30 ms per token; from where hardly anybody waits to where four in ten do."""
    workload = Workload(popularity=zipf(skew, adapters))
    scale = admission_cells.Scale(load=load, hold_seconds=256 * admission_cells.TOKEN_SECONDS)
    requests = admission_cells.calls(workload, scale, 3000, seed=1)
    simulated, by_rule = (
        play(requests, slots)[1000:].mean() for play in (admission_cells.simulated, admission_cells.by_rule)
    )
    assert 0.5 < simulated < 0.99
    assert abs(by_rule - simulated) < 0.02


def test_a_live_server_does_too(tmp_path):
    """The short form of bench.admission, which has the bar; compared with when calls came and how long they held."""
    admission.make(tmp_path, 16)
    workload = Workload(popularity=zipf(1.2, 16))
    with admission.serving(tmp_path, "--max-active-adapters", "5") as server:
        row = admission.measure(server, workload, 5, SCALE, tmp_path, clients=2)
    assert row["calls"] == 100 and row["client_count"] == row["server_count"]
    assert 0.3 < row["as_asked"] < 0.9
    assert abs(row["measured"]["mean"] - row["as_asked"]) < 0.15, row


def test_intervals_are_of_batches_of_what_comes_in_time():
    found = admission_cells.in_batches(np.repeat([-1.0, 1.0], 500), lowest=-1.0)
    assert found.mean == pytest.approx(0.0) and found.low < -0.6 and found.high > 0.6
    assert admission_cells.in_batches(np.ones(100)).low == 1.0
