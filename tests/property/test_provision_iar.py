"""Admissibility: equal to the slow oracles, monotone, exact at the ends, fast, and strict on input."""

import math
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import gammainc, ndtr

from lora_server.errors import ConfigError
from provisioning.iar import admissibility_curve, immediate_admissibility, min_cache_slots, oracle
from provisioning.iar.literal import condensed
from provisioning.iar.poisson_binomial import leave_one_out, poisson_binomial

MODELS = ("offered", "literal", "queued")
weights = st.lists(st.sampled_from([0.0, 1e-9, 0.01, 0.5, 1.0, 3.0, 250.0]), min_size=1, max_size=40).filter(any)
loads = st.floats(-2, 4).map(lambda exponent: 10.0**exponent)
exact = settings(max_examples=60)


def zipf(num: int, skew: float) -> np.ndarray:
    p = np.arange(1, num + 1) ** -float(skew)
    return p / p.sum()


ORACLES = {"literal": oracle.literal, "offered": oracle.offered}


def check_oracles(weights, load, slots, within):
    p = np.array(weights) / sum(weights)
    for model, slow in ORACLES.items():
        assert immediate_admissibility(weights, load, slots, model) == pytest.approx(slow(p, load, slots), abs=within)


@exact
@given(weights, loads, st.data())
def test_equals_the_oracle(popularity, load, data):
    check_oracles(popularity, load, data.draw(st.integers(0, len(popularity))), 1e-9)


@pytest.mark.parametrize("skew", [0.0, 1.2, *(pytest.param(skew, marks=pytest.mark.long) for skew in (0.7, 2.5))])
@pytest.mark.parametrize("load", [3.0, 200.0, 5000.0])
def test_equals_the_oracle_at_150(skew, load):
    for slots in (1, 40, 149):
        check_oracles(zipf(150, skew), load, slots, 1e-6)


@pytest.mark.parametrize("load", [5.0, 300.0, 1500.0])
def test_chebyshev_points_stand_for_all_distinct_rates(load):
    p = zipf(900, 1.1)
    present = -np.expm1(-load * p)
    whole, weights_RN = poisson_binomial(present), np.stack([p, p * present])
    direct, few = (leave_one_out(whole, present, weights_RN, most) for most in (900, 100))
    assert few[0] == direct[0] and np.abs(few[1] - direct[1]).max() < 1e-9


@exact
@given(weights, loads)
def test_offered_is_a_monotone_curve_from_0_to_1(popularity, load):
    curve = admissibility_curve(popularity, load)
    assert curve[0] == 0.0 and curve[-1] == 1.0
    assert (np.diff(curve) >= 0).all()
    assert (curve[: np.count_nonzero(popularity)] < 1.0).all()
    assert curve[len(popularity) // 2] == immediate_admissibility(popularity, load, len(popularity) // 2)


@exact
@given(weights, loads, st.sampled_from([0.3, 0.42, 0.5, 0.7, 0.9, 0.95, 0.99, 1.0]), st.sampled_from(MODELS))
def test_min_cache_slots_is_the_first_that_reaches_the_target(popularity, load, target, model):
    slots = min_cache_slots(popularity, load, target, model)
    values = [immediate_admissibility(popularity, load, m, model) for m in range(1, slots + 1)]
    assert values[-1] >= target - 1e-12
    assert all(value < target + 1e-12 for value in values[:-1])


def check_queued_rises(popularity, load):
    curve = [immediate_admissibility(popularity, load, m, "queued") for m in range(len(popularity) + 1)]
    assert (np.diff(curve) >= -1e-9).all()
    return curve


@exact
@given(weights, loads)
def test_queued_rises_with_slots(popularity, load):
    check_queued_rises(popularity, load)


@pytest.mark.parametrize(
    ("adapters", "skew", "load"), [(10, 1.2, 1000), (64, 0.4, 1000), (64, 1.2, 1e4), (100, 2.5, 1e5)]
)
def test_queued_rises_with_slots_where_hot_adapters_never_leave(adapters, skew, load):
    """Their waits are of the order of e^l; solved for in plain numbers, these cost up to 0.98 of the rate."""
    p = zipf(adapters, skew)
    curve = check_queued_rises(p, load)
    assert curve[adapters // 2] > p[: adapters // 2].sum() - 0.1  # who stays is the hot


def test_condensed_rates_sum_to_all():
    for skew, load in ((0.1, 1e4), (0.6, 1e4), (1.2, 1e6), (3.0, 1e6)):
        rates = load * zipf(20_000, skew)
        few, weight = condensed(rates)
        assert few.size < 2000
        for shape in np.geomspace(1e-10, rates.max() + 10, 40):
            assert weight @ gammainc(shape, few) == pytest.approx(gammainc(shape, rates).sum(), abs=1e-9)


@pytest.mark.parametrize("power", [0.1, 1, 6, 30])
def test_product_of_all_at_once_equals_the_recursion(power):
    q = np.random.default_rng(3).random(3000) ** power
    slow = np.zeros(q.size + 1)
    slow[0] = 1.0
    for present in q:
        slow[1:] = slow[1:] * (1 - present) + slow[:-1] * present
        slow[0] *= 1 - present
    law = poisson_binomial(q)
    window = slice(law.first, law.first + law.pmf.size)
    assert law.pmf == pytest.approx(slow[window], abs=1e-14)
    assert slow.sum() - slow[window].sum() < 1e-14


def test_literal_is_not_monotone_and_the_first_m_is_found():
    p = [0.2, 0.2] + [0.6 / 1000] * 1000
    assert immediate_admissibility(p, 1000, 1, "literal") == pytest.approx(0.45, abs=1e-3)
    assert immediate_admissibility(p, 1000, 2, "literal") == pytest.approx(0.40, abs=1e-3)
    assert min_cache_slots(p, 1000, 0.42, "literal") == 1


@pytest.mark.parametrize(("load", "target"), [(40.0, 0.9), (300.0, 0.8), (2000.0, 0.95)])
def test_pruned_literal_search_equals_the_scan(load, target):
    p = zipf(400, 1.1)
    slots = min_cache_slots(p, load, target, "literal")
    assert immediate_admissibility(p, load, slots, "literal") >= target
    assert all(immediate_admissibility(p, load, m, "literal") < target for m in range(1, slots))


def test_edgeworth_constant_has_its_margin():
    rng, worst = np.random.default_rng(7), 0.0
    for _ in range(60):
        q = rng.random(int(rng.integers(150, 900))) ** rng.uniform(0.2, 5)
        variance, skew = (q * (1 - q)).sum(), (q * (1 - q) * (1 - 2 * q)).sum()
        if variance < 25:
            continue
        law = poisson_binomial(q)
        x = (law.first + np.arange(law.pmf.size) + 0.5 - q.sum()) / math.sqrt(variance)
        approximation = ndtr(x) + skew / variance**1.5 / 6 * (1 - x * x) * np.exp(-x * x / 2) / math.sqrt(2 * math.pi)
        worst = max(worst, variance * np.abs(np.cumsum(law.pmf) - approximation).max())
    assert 0 < worst < 0.05


def test_numbers_of_the_ecosystem_page():
    p = zipf(512, 1.2)
    assert immediate_admissibility(p, 512, 128, "literal") == pytest.approx(0.919, abs=5e-4)
    assert immediate_admissibility(p, 2048, 128, "literal") == pytest.approx(0.933, abs=5e-4)
    assert immediate_admissibility(zipf(100, 1.2), 1024, 5) < 0.1


def test_any_weights_and_containers():
    assert immediate_admissibility([2, 2], 1, 1) == immediate_admissibility((1e308, 1e308), 1.0, 1)
    assert immediate_admissibility(np.array([5]), 3, 1) == 1.0
    assert immediate_admissibility([0, 1, 0], 3, 1, "literal") == 1.0
    assert min_cache_slots([0, 1, 0], 3, 1.0) == 1
    assert min_cache_slots([1.0] * 64, 1e-3, 1.0) == 64


BAD = {
    "popularity": [
        ([], 1, 0), ([0, 0], 1, 1), ([1, math.nan], 1, 1), ([1, math.inf], 1, 1), ([1, -1], 1, 1), ([[1], [1]], 1, 1),
        ("ab", 1, 1), (None, 1, 1), (["1", "2"], 1, 1), ([True, 2], 1, 1), (np.array([True, False]), 1, 1),
        ({"law": 3, "code": 1}, 1, 1), (b"ab", 1, 1),
    ],
    "global_batch": [([1, 1], 0, 1), ([1, 1], -3, 1), ([1, 1], math.nan, 1), ([1, 1], math.inf, 1)],
    "cache_slots": [([1, 1], 1, -1), ([1, 1], 1, 3), ([1, 1], 1, 1.5)],
    "model": [([1, 1], 1, 1, "exact")],
}  # fmt: skip


@pytest.mark.parametrize(("named", "arguments"), [(named, one) for named, rows in BAD.items() for one in rows])
def test_bad_input_is_one_line_that_names_the_argument(named, arguments):
    with pytest.raises(ConfigError, match=f"^{named}: .*") as caught:
        immediate_admissibility(*arguments)
    assert isinstance(caught.value, ValueError)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("target", [0, -0.1, 1.01, math.nan, "x"])
def test_bad_target(target):
    with pytest.raises(ConfigError, match=r"^target: "):
        min_cache_slots([1, 1], 1, target)


@pytest.mark.long
@pytest.mark.parametrize("model", MODELS)
def test_100_000_adapters_are_planned_in_little_memory(model):
    """In less than 1 GB; bench/provision_speed.py says how fast."""
    p = zipf(100_000, 1.0)
    tracemalloc.start()
    assert immediate_admissibility(p, 1e6, 70_000, model) > 0.8
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    slots = min_cache_slots(p, 1e6, 0.95, model)
    assert immediate_admissibility(p, 1e6, slots, model) >= 0.95 - 1e-12
    assert slots == 1 or immediate_admissibility(p, 1e6, slots - 1, model) < 0.95
    assert peak < 2**30


@pytest.mark.parametrize("rate", [400, 610, 650, 5000, 1e300])
def test_queued_never_promises_what_does_not_fit(rate):
    """All adapters equally hot: nobody leaves, so at most M of N requests can be admitted."""
    for num in (2, 4, 10, 64):
        weights = [1] * num
        assert immediate_admissibility(weights, num * rate, 1, model="queued") <= 1 / num + 1e-9
        assert min_cache_slots(weights, num * rate, 0.95, model="queued") >= 0.9 * num
