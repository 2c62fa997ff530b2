"""Plan and reality: the server's rule admits at once what `provision`'s simulation admits at once.

A live server does too: tests/unit/provisioning/test_watch.py.
"""

import numpy as np
import pytest

from bench import admission_cells
from provisioning.workload.workload import Workload, zipf


@pytest.mark.parametrize(("adapters", "skew", "load", "slots"), [
    (512, 1.2, 256, 90), (128, 1.2, 64, 20), (128, 1.2, 64, 32), (64, 0.8, 40, 24), (64, 1.0, 20, 12),
])  # fmt: skip
def test_the_rule_admits_what_the_simulation_admits(adapters, skew, load, slots):
    """In virtual time, at 30 ms per token; from where hardly any call waits to where four in ten do."""
    workload = Workload(popularity=zipf(skew, adapters))
    scale = admission_cells.Scale(load=load, hold_seconds=256 * admission_cells.TOKEN_SECONDS)
    requests = admission_cells.calls(workload, scale, 3000, seed=1)
    simulated, by_rule = (
        play(requests, slots)[1000:].mean() for play in (admission_cells.simulated, admission_cells.by_rule)
    )
    assert 0.5 < simulated < 0.99
    assert abs(by_rule - simulated) < 0.02


def test_intervals_are_of_batches_of_what_comes_in_time():
    found = admission_cells.in_batches(np.repeat([-1.0, 1.0], 500), lowest=-1.0)
    assert found.mean == pytest.approx(0.0) and found.low < -0.6 and found.high > 0.6
    assert admission_cells.in_batches(np.ones(100)).low == 1.0
