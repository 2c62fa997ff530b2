"""Copies of hot adapters in coupled instances, and spare GPUs where GPUs are counted."""

from dataclasses import replace

import numpy as np
import pytest

from provisioning.inputs import InputError
from provisioning.plan.coupled import coupled
from provisioning.plan.scenario import Flags, scenario
from provisioning.workload.copies import in_turn


def question(**given):
    asked = {"slo": "ttft_p95=250ms,tpot_avg=100ms", "model": "mixtral-8x7b", "adapters": 512, "gpu": "hopper-96"}
    return scenario(Flags(**({"instances": 4, "batch_size": 64.0, **asked} | given)))


def test_a_hot_adapter_has_copies_in_coupled_instances():
    """Half of the load is one adapter's: alone in an instance of eight it is over its room for KV."""
    flags = {"adapters": 200, "zipf": 1.6, "instances": 8, "batch_size": 80.0, "context_tokens": 4096.0}
    asked = question(**flags)
    found, paper = coupled(asked, 8), coupled(replace(asked, coupled_split=0.5), 8)
    assert found.copies == 4 and not paper.copies
    assert found.split.admitted > 1.5 * paper.split.admitted
    calls = asked.workload.sample(rate=10.0, num_requests=5000, seed=1)
    copied = in_turn(calls, np.array([4, *[1] * 199]))
    first = copied.counts()[:4]
    assert first.sum() == calls.counts()[0] and np.ptp(first) <= 1
    assert copied.counts()[4:].tolist() == calls.counts()[1:].tolist()


def test_spare_gpus_count_among_the_most_and_the_nodes():
    plain = question(max_gpus=16, whole_nodes=True)
    assert list(plain.gpu_counts) == [8, 16] and list(replace(plain, spare_gpus=1).gpu_counts) == [7, 15]
    assert list(replace(plain, whole_nodes=False, spare_gpus=14).gpu_counts) == [1, 2]
    with pytest.raises(InputError, match=r"--spare-gpus: got 16, expected a whole number in \[0, 15\]"):
        question(max_gpus=16, spare_gpus=16)
