"""source/route.cu, run on this CPU, against kernels_cuda.routing.reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kernels_cuda import routing
from kernels_cuda.heuristics import Variant
from tests.support.gpu import emulated

pytestmark = pytest.mark.skipif(bool(emulated.MISSING), reason=emulated.MISSING)
GARBAGE = -77
VARIANT = Variant(bulk_copy=False, warps=2)


def garbage(pairs):
    route = routing.Route.empty(pairs, "cpu", max_rows=pairs)
    for tensor in outputs(route):
        tensor.fill_(GARBAGE)
    route.counts.fill_(GARBAGE)
    return route


def outputs(route):
    return (route.segments, route.token_N, route.pair_N, route.weights_N, route.row_N, route.token_M)


def inputs(tokens, top_k, num_adapters, num_experts, seed, popularity="zipf", absent=0.1):
    rng = np.random.default_rng(seed)
    weight = np.ones(num_adapters) if popularity == "uniform" else np.arange(1, num_adapters + 1) ** -1.2
    adapters = (
        rng.choice(num_adapters, tokens, p=weight / weight.sum())
        if popularity != "one"
        else np.full(tokens, num_adapters - 1)
    )
    adapters[rng.random(tokens) < absent] = -1
    experts = rng.integers(-1 if absent else 0, num_experts, (tokens, top_k))
    directory = rng.integers(0, 1 << 20, (num_adapters, routing.DIRECTORY_INTS))
    directory[rng.random(num_adapters) < absent / 2, 2] = 0  # no delta at this site
    weights = rng.random((tokens, top_k), np.float32)
    return experts.astype(np.int32), weights, adapters.astype(np.int32), directory.astype(np.int32)


def choice(arrays, num_experts, among=None):
    return routing.Choice(*(torch.from_numpy(array) for array in arrays), num_experts, among)


def launch(arrays, num_experts, route, variant=VARIANT, among=None):
    values = routing.arguments(choice(arrays, num_experts, among), route)
    emulated.run("route", values, variant, source="route.cu")


def check(arrays, num_experts, variant=VARIANT, spare=3, among=None):
    experts, _, adapters, _ = arrays
    route = garbage(experts.size + spare)
    launch(arrays, num_experts, route, variant, among)
    expected = routing.reference(*arrays, num_experts, among)
    segments, entries = len(expected.segments), len(expected.pair_N)
    assert route.counts.tolist() == [segments, entries, len(adapters), len(expected.token_M)]
    for tensor, wanted in zip(outputs(route), expected, strict=True):
        np.testing.assert_array_equal(tensor[: len(wanted)].numpy(), wanted)
        assert (tensor[len(wanted) :] == GARBAGE).all(), "wrote beyond what there is"


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(1, 70),
    top_k=st.integers(1, 8),
    num_adapters=st.integers(1, 600),
    num_experts=st.integers(1, 128),
    seed=st.integers(0, 2**31),
    popularity=st.sampled_from(["zipf", "uniform", "one"]),
    absent=st.sampled_from([0.0, 0.1, 1.0]),
)
@example(1, 1, 1, 1, 0, "one", 0.0)
@example(1, 1, 1, 1, 0, "one", 1.0)
@example(64, 8, 4095, 128, 7, "uniform", 0.0)
def test_equals_the_reference(tokens, top_k, num_adapters, num_experts, seed, popularity, absent):
    check(inputs(tokens, top_k, num_adapters, num_experts, seed, popularity, absent), num_experts)


@settings(max_examples=20, deadline=None)
@given(tokens=st.integers(1, 40), begin=st.integers(0, 16), size=st.integers(0, 16), seed=st.integers(0, 2**31))
def test_only_the_experts_of_one_shard(tokens, begin, size, seed):
    check(inputs(tokens, 4, 9, 16, seed), 16, among=range(begin, min(begin + size, 16)))


def test_weights_that_nobody_asks_for():
    experts, weights, adapters, directory = inputs(9, 4, 5, 8, 3)
    route = garbage(36)
    arrays = [torch.from_numpy(array) for array in (experts, adapters, directory)]
    emulated.run(
        "route", routing.arguments(routing.Choice(arrays[0], None, *arrays[1:], 8), route), VARIANT, source="route.cu"
    )
    expected = routing.reference(experts, weights, adapters, directory, 8)
    np.testing.assert_array_equal(route.pair_N[: len(expected.pair_N)].numpy(), expected.pair_N)
    assert (route.weights_N == GARBAGE).all()


@pytest.mark.parametrize("warps", [*(pytest.param(warps, marks=pytest.mark.long) for warps in (4, 6)), 8])
@pytest.mark.parametrize(("tokens", "top_k"), [(1024, 8), (1024, 2), (8192, 1), (1170, 7)])
def test_large_steps(tokens, top_k, warps):
    check(inputs(tokens, top_k, 512, 128, warps), 128, Variant(bulk_copy=False, warps=warps))


def test_shared_memory_is_what_the_source_says():
    for warps in (2, 8):
        variant = Variant(bulk_copy=False, warps=warps)
        assert emulated.shared_bytes(variant, "route.cu") == routing.shared_bytes(warps)


def test_a_second_step_in_the_same_memory():
    route = garbage(512)
    for seed, tokens in ((1, 64), (2, 3), (3, 64)):
        arrays = inputs(tokens, 8, 100, 32, seed)
        launch(arrays, 32, route)
        expected = routing.reference(*arrays, 32)
        assert route.counts.tolist()[:3] == [len(expected.segments), len(expected.pair_N), tokens]
        np.testing.assert_array_equal(route.pair_N[: len(expected.pair_N)].numpy(), expected.pair_N)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: (a[0].astype(np.int64), *a[1:]), "experts is torch.int64"),
        (lambda a: (a[0], a[1][:, :1].copy(), *a[2:]), r"weights is torch.float32 \(4, 1\)"),
        (lambda a: (*a[:2], a[2][:3], a[3]), r"adapters is torch.int32 \(3,\)"),
        (lambda a: (*a[:3], np.zeros((1 << 19, 3), np.int32)), "list only those that are in use"),
        (lambda a: (np.zeros((9, 2), np.int32), np.zeros((9, 2), np.float32), *a[2:]), "cut the step"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    arrays = change(inputs(4, 2, 5, 3, 0))
    with pytest.raises(ValueError, match=message):
        routing.arguments(choice(arrays, 3), garbage(8))
