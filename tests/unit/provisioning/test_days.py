"""Days of the process that is fitted to a trace: what stays as it was, and what does not."""

import numpy as np
import pytest

from provisioning.plan.choice import smallest
from provisioning.plan.judge import judge
from provisioning.plan.verify import disaggregated
from provisioning.simulation.measure import Estimate
from provisioning.workload.days import DayProcess
from provisioning.workload.together import groups
from tests.support.provision import DECODING, QWEN, calls, question, requests, write


def trace(kind, seed=1, days=1):
    each, slower = [calls(kind, seed + day) for day in range(days)], 86_400 / 3600 if days > 1 else 1
    arrival_s = np.concatenate([at * slower + 86_400 * day for day, (at, _, _) in enumerate(each)])
    adapter, tokens = (np.concatenate([one[place] for one in each]) for place in (1, 2))
    return requests(arrival_s, tokens, adapter)


def loads(requests, num, span_s):
    window = np.minimum(requests.arrival_s * num // span_s, num - 1).astype(int)
    return np.bincount(window, requests.output_tokens, num) / requests.output_tokens.sum() * num


def test_a_steady_trace_has_steady_days():
    process = DayProcess.of(trace("steady"))
    (every,) = process.groups
    assert max(process.spreads) < 0.07 and every.curve_W.max() == 1
    day = process.day(1)
    assert len(day) == pytest.approx(15_000, rel=0.1) and (np.diff(day.arrival_s) >= 0).all()
    assert loads(day, 8, 3600).std() < 0.1
    assert (process.day(1).adapter == day.adapter).all() and len(process.day(2)) != len(day)


def test_a_diurnal_trace_has_its_curve_every_day():
    process = DayProcess.of(trace("diurnal"))
    for seed in range(1, 6):
        assert loads(process.day(seed), 8, 3600) == pytest.approx(loads(process.trace, 8, 3600), abs=0.25)


def test_of_several_days_one_is_drawn():
    process = DayProcess.of(trace("diurnal", days=3))
    day = process.day(4)
    assert process.groups[0].per_day == 96
    assert day.arrival_s[-1] <= 86_400 and len(day) == pytest.approx(15_000, rel=0.1)
    assert loads(day, 8, 86_400)[1] > 1.4 and loads(day, 8, 86_400)[6] < 0.6


def test_adapters_that_are_called_together_still_are():
    """Of five sets one is popular at a time, and each day has other calls."""
    process = DayProcess.of(trace("drift"))
    for seed in (1, 2):
        day = process.day(seed)
        window = (day.arrival_s * 48 // 3600).astype(int)
        alike = [np.unique(day.adapter[window == at]).size for at in range(48)]
        of_trace = [np.unique(process.trace.adapter[at : at + 312]).size for at in range(0, 14_000, 312)]
        assert np.median(alike) < 1.15 * np.median(of_trace)


def test_days_have_higher_and_lower_peaks_than_the_trace():
    arrival_s, adapter, tokens = calls("steady", 3)
    busy = (arrival_s % 900) < 300  # the calls of these minutes come twice
    both = np.sort(np.r_[arrival_s, arrival_s[busy] + 0.01])
    twice = requests(both, np.resize(tokens, both.size), np.resize(adapter, both.size))
    process = DayProcess.of(twice)
    peaks = [loads(process.day(seed), 24, 3600).max() for seed in range(1, 9)]
    assert process.spreads[1] > 0.03 and min(peaks) < loads(twice, 24, 3600).max() < max(peaks)


def test_tenants_that_are_busy_by_chance_are_told_from_those_that_take_turns():
    """Ten tenants of 30 adapters each: on in a quarter of 24 sessions, or one after the other.

    Every third adapter is called too rarely to be told from chance by itself.
    """
    rng = np.random.default_rng(2)
    by_chance = rng.random((24, 10)) < 0.25
    in_turn = np.arange(10) == np.arange(24)[:, None] % 10
    for sessions, told in ((by_chance, True), (in_turn, False)):
        counts_SN = rng.poisson(np.repeat(sessions, 30, axis=1) * np.resize([40, 40, 4], 300))
        adapter, sizes = np.concatenate([np.repeat(np.arange(300), row) for row in counts_SN]), counts_SN.sum(axis=1)
        found = groups(adapter, np.append(0, np.cumsum(sizes)), np.ones(24), 300)
        names = [np.unique(found[30 * one : 30 * one + 30]).tolist() for one in range(10)]
        assert found.any() == told and all(len(own) == 1 for own in names)


def test_a_plan_of_a_trace_is_judged_by_days(tmp_path):
    trace = write(tmp_path / "t.csv", "steady", 5, num=4000)
    asked = question(**QWEN, **DECODING, adapters=None, trace=trace)
    chosen = smallest(asked).chosen
    found = judge(asked, disaggregated(chosen), chosen.mean_step_us, 5)
    assert found.seeds == 20 and found.within_ttft.low <= found.own <= found.within_ttft.high + 0.02
    worst = Estimate.of_days([0.9, *[0.99] * 19])
    assert worst.low == pytest.approx(0.9855) and worst.high == 0.99
