"""The simulator: small cases by hand, invariants, speed, and the models against it."""

import functools
import itertools
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench import provision_iar
from provisioning.iar import admissibility_curve, immediate_admissibility, min_cache_slots
from provisioning.inputs import InputError
from provisioning.plan import judge as judging
from provisioning.plan.candidates import all_but_cache
from provisioning.plan.choice import smallest
from provisioning.plan.judge import Verdict, judge, played
from provisioning.plan.verify import Search, disaggregated, no_better, verify
from provisioning.simulation.measure import Estimate
from provisioning.simulation.run import System, assign_greedily, run
from provisioning.workload.requests import Lengths, Requests
from provisioning.workload.workload import Workload, zipf
from tests.support.provision import question


def calls(*rows: tuple[float, int, int], num_adapters: int) -> Requests:
    arrival, adapter, tokens = map(np.array, zip(*rows, strict=True))
    return Requests(arrival_s=arrival.astype(float), adapter=adapter, output_tokens=tokens, num_adapters=num_adapters)


def test_one_slot_two_adapters():
    requests = calls((0, 0, 3), (1, 1, 2), (1.5, 0, 1), num_adapters=2)
    outcome = run(requests, System(instance_of=[0, 0], step_s=[1.0], cache_slots=1))
    assert outcome.immediate.tolist() == [True, False, True]
    assert outcome.admit_s.tolist() == [0, 3, 1.5]  # the third joins its resident adapter and overtakes
    assert outcome.finish_s.tolist() == [3, 5, 3]
    assert outcome.ttft_s.tolist() == [1, 3, 1.5]  # joins at the next step, at 2


def test_full_batch_waits_and_load_delays_the_first_token():
    requests = calls((0, 0, 2), (0, 0, 2), num_adapters=1)
    outcome = run(requests, System(instance_of=[0], step_s=[1.0], cache_slots=1, max_batch=1, load_s=4.0))
    assert outcome.admit_s.tolist() == [0, 6]
    assert outcome.ttft_s.tolist() == [5, 7]


def test_sjf_takes_the_shorter_first():
    requests = calls((0, 0, 10), (1, 1, 9), (2, 2, 1), num_adapters=3)
    for order, first in (("fcfs", 1), ("sjf", 2)):
        outcome = run(requests, System(instance_of=[0] * 3, step_s=[1.0], cache_slots=1, order=order))
        assert outcome.admit_s[first] == 10
        assert outcome.admit_s[3 - first] > 10


def test_caches_of_coupled_instances_are_apart():
    requests = calls((0, 0, 5), (0, 1, 5), num_adapters=2)
    coupled = System(instance_of=[0, 1], step_s=[1.0], cache_slots=1, shared=False)
    shared = System(instance_of=[0, 1], step_s=[1.0], cache_slots=1)
    assert run(requests, coupled).immediate.tolist() == [True, True]
    assert run(requests, shared).immediate.tolist() == [True, False]


def test_a_router_sends_requests_to_the_adapter_and_a_hot_one_to_several_instances():
    routed = System(instances=2, step_s=[1.0], cache_slots=1, shared=False, load_s=10.0)
    requests = calls((0, 0, 9), (0, 1, 9), (1, 1, 4), (1, 0, 4), (2, 2, 4), num_adapters=3)
    outcome = run(requests, routed)
    assert outcome.immediate.tolist() == [True, True, True, True, False]
    assert outcome.ttft_s.tolist() == [11, 11, 1, 1, 28]  # the last waits for a slot, until 19, and for its load
    # the least loaded has none: at two more the hot adapter's next is loaded there
    hot = run(calls(*[(0, 0, 9)] * 6, num_adapters=1), routed)
    assert hot.ttft_s.tolist() == [11, 1, 1, 11, 1, 1] and hot.immediate.all()


@settings(max_examples=40)
@given(st.integers(1, 6), st.sampled_from([None, 1, 3]), st.integers(0, 2**32 - 1), st.sampled_from(["fcfs", "sjf"]))
def test_behind_a_router_all_are_served_from_no_more_slots_than_there_are(slots, max_batch, seed, order):
    workload = Workload(popularity=zipf(0.8, 12), lengths=Lengths(mean_tokens=6))
    requests = workload.sample(rate=3, num_requests=150, seed=seed)
    system = System(instances=2, step_s=[0.5], cache_slots=slots, shared=False, max_batch=max_batch, order=order)
    outcome = run(requests, system)
    assert np.isfinite(outcome.finish_s).all() and (outcome.admit_s >= requests.arrival_s).all()
    assert outcome.immediate.all() or slots < 12 or max_batch
    for now in outcome.admit_s:
        active = (outcome.admit_s <= now) & (now < outcome.finish_s - 1e-9)
        assert np.unique(requests.adapter[active]).size <= 2 * slots and active.sum() <= 2 * (max_batch or 150)


def test_a_step_takes_the_time_of_its_batch():
    requests = calls((0, 0, 4), (2, 0, 4), num_adapters=1)
    outcome = run(requests, System(instance_of=[0], step_s=[1.0, 1.0, 2.0], cache_slots=1))
    assert outcome.finish_s.tolist() == [6, 8]  # 2 tokens at 1 s, 2 at 2 s; then 2 more at 1 s


@pytest.mark.parametrize("mean_tokens", [1e9, 1e12])
def test_a_run_of_years_still_moves(mean_tokens):
    """A step is then less than the clock's last digit."""
    workload = Workload(popularity=zipf(1.2, 50), lengths=Lengths(mean_tokens=mean_tokens))
    requests = workload.sample(rate=3 / (mean_tokens * 0.025), num_requests=3000, seed=0)
    system = System(instance_of=[0] * 50, step_s=[0.025], cache_slots=2)
    outcome = run(requests, system)
    assert np.isfinite(outcome.finish_s).all()
    few = Workload(popularity=zipf(1.2, 50)).sample(rate=3 / (256 * 0.025), num_requests=3000, seed=0)
    short = run(few, system)
    assert outcome.immediate.mean() == pytest.approx(short.immediate.mean(), abs=0.02)


def test_any_instance_takes_the_requests_of_a_hot_adapter():
    requests = calls((0, 0, 4), (0, 0, 4), (1, 0, 4), (1, 1, 4), num_adapters=2)
    steps = [1.0, 1.0, 2.0, 3.0]
    own = run(requests, System(instance_of=[0, 1], step_s=steps, cache_slots=2))
    anywhere = run(requests, System(instances=2, step_s=steps, cache_slots=2))
    assert own.finish_s.max() > anywhere.finish_s.max() and own.finish_s[0] > anywhere.finish_s[0]
    assert anywhere.finish_s.tolist() == [7, 7, 8, 8]  # two on each: 1 token at 1 s, 3 at 2 s; then 1 more at 1 s


@settings(max_examples=40)
@given(st.integers(1, 6), st.sampled_from([1, 3]), st.integers(0, 2**32 - 1), st.integers(2, 5))
def test_with_any_instance_nobody_waits_beside_an_empty_place(slots, max_batch, seed, instances):
    workload = Workload(popularity=zipf(0.8, 12), lengths=Lengths(mean_tokens=6))
    requests = workload.sample(rate=1.5 * instances, num_requests=120, seed=seed)
    system = System(instances=instances, step_s=[0.5], cache_slots=slots, max_batch=max_batch)
    outcome = run(requests, system)
    assert np.isfinite(outcome.finish_s).all()
    for request in np.flatnonzero(~outcome.immediate):
        now = requests.arrival_s[request]
        active = (outcome.admit_s <= now) & (now < outcome.finish_s - 1e-9)
        present = set(requests.adapter[active])
        assert active.sum() >= max_batch * instances or len(present - {requests.adapter[request]}) >= slots


def test_system_must_know_all_adapters():
    with pytest.raises(InputError, match="instance_of"):
        run(calls((0, 0, 1), num_adapters=2), System(instance_of=[0], step_s=[1.0], cache_slots=1))


def test_prompts_hold_up_their_instance_but_not_their_own_first_token():
    requests = calls((0, 0, 3), (1, 0, 2), num_adapters=1)
    outcome = run(requests, System(instance_of=[0], step_s=[1.0], cache_slots=1, prompt_s=2.0))
    assert outcome.ttft_s.tolist() == [1, 2]
    # at 1 the first has 1 s of its own prompt left; then 2 s of the second's
    assert outcome.finish_s.tolist() == [7, 6]


def test_a_step_with_its_share_of_prompts_is_what_the_simulation_takes():
    chosen = smallest(question()).chosen
    outcome = run(played(chosen.scenario, chosen.mean_step_us, 0), disaggregated(chosen))
    per_token_s = (outcome.finish_s - outcome.admit_s).mean() / outcome.requests.output_tokens.mean()
    own_s = chosen.prompt_us * 1e-6 / chosen.scenario.workload.lengths.mean_tokens  # a request waits for its own, too
    assert chosen.mean_step_us > 1.2 * chosen.decode_step_us
    assert per_token_s - own_s == pytest.approx(chosen.mean_step_us * 1e-6, rel=0.05)


def verdict(holds):
    sure = Estimate(mean=holds, low=holds, high=holds)
    return Verdict(
        immediate=sure, ttft_s_at_percentile=sure, within_ttft=sure, adapters_within_slo=sure, seeds=5,
        requests_per_seed=1, target=0.95, iar=None, worst_window=None, ttft_s=np.zeros(1), by_adapter=np.zeros((2, 1)),
    )  # fmt: skip


ASKED = [
    {"model": "qwen3-30b-a3b", "lora_rank": 128, "gpu": "hopper-96", "adapters": 600, "request_rate": 25.0,
     "mean_output_tokens": 800.0, "instances": 3, "batch_size": None, "max_gpus": 40, "prefill": "apart"},
    {"max_gpus": 24}, {"model": "dbrx", "adapters": 400, "max_gpus": 30}, {"model": "gpt-oss-20b", "max_gpus": 16},
]  # fmt: skip


@functools.cache
def layouts_of(place):
    return [item for found in all_but_cache(question(**ASKED[place])) for item in found]


@settings(max_examples=60)
@given(st.data())
def test_the_search_finds_what_trying_every_layout_finds(data):
    """A layout holds that is no worse than one of some drawn ones, whatever its count."""
    layouts = layouts_of(data.draw(st.integers(0, len(ASKED) - 1)))
    enough = data.draw(st.lists(st.sampled_from(layouts), max_size=3))
    first = data.draw(st.none() | st.sampled_from(layouts))

    def holds(item):
        return any(no_better(one, item) for one in enough)

    search = Search(layouts, lambda item: verdict(float(holds(item))))
    found, fewest = search.smallest(first), min((item.gpus for item in layouts if holds(item)), default=None)
    assert (found and found.candidate.gpus) == fewest
    if found:
        quickest = min((len(item.failed), item.step_us) for item in layouts if item.gpus == fewest and holds(item))
        assert (len(found.candidate.failed), found.candidate.step_us) == quickest
    assert len(search.held) + len(search.refuted) <= len(layouts)


@pytest.mark.long
def test_fewer_gpus_with_more_slots_are_found():
    """28 GPUs hold as ep7-pp4, where 29 as ep29-pp1 and 30 as ep15-pp2 do not."""
    asked = question(**ASKED[0] | {"max_gpus": 28, "zipf": 1.0, "burst_cv": 1.5, "iar": 0.95})
    chosen = verify(asked, smallest(asked), 5).choice.chosen
    assert chosen is not None and str(chosen.layout) == "ep7-pp4"


SMALL = {
    "model": ["qwen3-30b-a3b", "mixtral-8x7b", "gpt-oss-20b", "dbrx"], "adapters": [60, 150, 300],
    "zipf": [0.4, 1.0, 1.4], "lora_rank": [32, 64, 128], "gpu": ["h100", "hopper-96"], "burst_cv": [1.0, 2.0],
    "batch_size": [16.0, 40.0], "prefill": ["shared", "apart"], "instances": [2, 4],
}  # fmt: skip


def small_question(seed):
    rng = random.Random(seed)
    return question(max_gpus=9, **{name: rng.choice(values) for name, values in SMALL.items()})


@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(6, 200))])
def test_no_smaller_count_passes_the_check_that_the_answer_passes(seed, monkeypatch):
    """Every layout of every count is judged, by shorter runs than a plan's; the search asks the same judge."""
    monkeypatch.setattr(judging, "_FEWEST_CALLS", 2000)
    asked, verdicts = small_question(seed), {}

    def bears(item):
        if item.layout not in verdicts:
            verdicts[item.layout] = judge(item.scenario, disaggregated(item), item.mean_step_us, 5, give_up=True)
        return verdicts[item.layout]

    layouts = [item for found in all_but_cache(asked) for item in found]
    model = smallest(asked).chosen
    first = next((item for item in layouts if model and item.layout == model.layout), None)
    found = Search(layouts, bears).smallest(first) if layouts else None
    held = (item.gpus for item in layouts if bears(item).holds)
    assert (found and found.candidate.gpus) == next(held, None)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(12))
def test_the_answer_is_that_of_simulating_every_layout_of_every_count(seed):
    asked = small_question(seed)
    found = verify(asked, smallest(asked), 5).choice.chosen
    every = (item for layouts in all_but_cache(asked) for item in layouts)
    held = (item.gpus for item in every if judge(item.scenario, disaggregated(item), item.mean_step_us, 5).holds)
    assert (found and found.gpus) == next(held, None)


systems = st.fixed_dictionaries(
    {
        "cache_slots": st.integers(1, 6),
        "max_batch": st.sampled_from([None, 1, 3]),
        "shared": st.booleans(),
        "order": st.sampled_from(["fcfs", "sjf"]),
        "load_s": st.sampled_from([0.0, 0.3]),
    }
)


@settings(max_examples=80)
@given(systems, st.integers(0, 2**32 - 1), st.integers(1, 3))
def test_never_more_residents_than_slots_nor_requests_than_places(options, seed, instances):
    workload = Workload(popularity=zipf(0.8, 12), lengths=Lengths(mean_tokens=6))
    requests = workload.sample(rate=3, num_requests=150, seed=seed)
    owner = assign_greedily(workload.popularity, instances)
    outcome = run(requests, System(instance_of=owner, step_s=[0.5, 0.5, 0.6, 0.8], **options))
    assert np.isfinite(outcome.finish_s).all()
    assert (outcome.admit_s >= requests.arrival_s).all()
    assert (outcome.first_token_s > outcome.admit_s).all()
    assert (outcome.admit_s[outcome.immediate] == requests.arrival_s[outcome.immediate]).all()
    caches = np.zeros(12, dtype=int) if options["shared"] else owner
    for now in outcome.admit_s:
        active = (outcome.admit_s <= now) & (now < outcome.finish_s - 1e-9)
        present = np.unique(requests.adapter[active])
        assert np.bincount(caches[present], minlength=1).max(initial=0) <= options["cache_slots"]
        if options["max_batch"]:
            assert np.bincount(owner[requests.adapter[active]], minlength=1).max(initial=0) <= options["max_batch"]


def test_greedy_assignment_balances():
    popularity = zipf(1.2, 100)
    loads = np.bincount(assign_greedily(popularity, 4), weights=popularity)
    assert loads.sum() == pytest.approx(1)
    assert loads.max() - loads.min() <= popularity.max()


def test_interval_of_seeds():
    rates = [0.94, 0.95, 0.96, 0.95, 0.95]
    estimate, half = Estimate.of(rates), 2.776 * np.std(rates, ddof=1) / 5**0.5
    assert estimate.mean == pytest.approx(0.95) and estimate.high - estimate.mean == pytest.approx(half, rel=1e-3)


def simulated(popularity, load, slots):
    """(rate, half width of the 95 % interval) of immediate admission; open arrivals, one shared cache."""
    found = provision_iar.simulated(popularity, load, slots, num=20_000)
    return found.mean, found.high - found.mean


HOT = [(32, 1.2, 5000), (64, 1.6, 1500)]
HOT_DEALT = [(100, 1.2, 1000, 86), (100, 1.6, 1000, 62), (64, 1.2, 3000, 61)]
GRID = list(itertools.product((0.0, 0.4, 0.8, 1.2), ((100, 60), (100, 1000), (256, 250), (512, 60), (512, 1000))))


@pytest.mark.parametrize(
    ("skew", "size", "level"),
    [
        pytest.param(*cell, level, marks=[] if place % 7 == 0 else pytest.mark.long)
        for place, (cell, level) in enumerate(itertools.product(GRID, (0.88, 0.96)))
    ],
)
def test_models_against_simulation(skew, size, level):
    """`queued` within 2 points down to 0.85. `offered` no more than 1.5 points too high from 0.95 on; it is up to
    3 points too low where the cache is over-subscribed and skewed, since there it is the cold who wait."""
    adapters, load = size
    popularity = zipf(skew, adapters)
    slots = int(np.argmax(admissibility_curve(popularity, load) >= level))
    rate, reach = simulated(popularity, load, slots)
    offered, queued = (immediate_admissibility(popularity, load, slots, model) for model in ("offered", "queued"))
    if offered >= 0.95:
        assert offered - rate <= 0.015 + reach
        assert rate - offered <= 0.03 + reach
    if queued >= 0.85:
        assert abs(queued - rate) <= 0.02 + reach


@pytest.mark.parametrize(
    ("adapters", "skew", "load"),
    [(64, 0.4, 500), (64, 0.8, 1500), *(pytest.param(*cell, marks=pytest.mark.long) for cell in HOT)],
)
def test_queued_where_hot_adapters_hardly_ever_leave(adapters, skew, load):
    """Dozens of requests per adapter: who came first keeps the slots for the whole run."""
    popularity = zipf(skew, adapters)
    slots = min_cache_slots(popularity, load, 0.88, "queued")
    rate, reach = simulated(popularity, load, slots)
    assert abs(immediate_admissibility(popularity, load, slots, "queued") - rate) <= 0.02 + reach


@pytest.mark.parametrize(
    ("adapters", "skew", "load", "slots"),
    [(100, 0.8, 1000, 95), (100, 0.0, 20, 25), *(pytest.param(*cell, marks=pytest.mark.long) for cell in HOT_DEALT)],
)
def test_offered_is_an_even_deal_of_the_slots(adapters, skew, load, slots):
    """Where the slots are dealt anew at every arrival, `offered` holds, also where an engine, whose adapters keep
    their slots while in use, admits more: 2 to 4 points in the first four cells."""
    popularity = zipf(skew, adapters)
    dealt = provision_iar.shared_snapshots(popularity, load, slots)
    offered = immediate_admissibility(popularity, load, slots)
    assert offered >= 0.95
    assert abs(offered - dealt.mean) <= 0.005 + dealt.high - dealt.mean
    if load >= 1000:
        assert simulated(popularity, load, slots)[0] > offered + 0.015
