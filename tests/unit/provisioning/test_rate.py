"""A rate of requests: the load that the plan's own step leads to, its instances, and who takes which request."""

import random
from dataclasses import replace

import pytest

from provisioning.plan.candidates import evaluate
from provisioning.plan.choice import smallest
from provisioning.plan.coupled import compare
from provisioning.plan.flags import PlanFlags
from provisioning.plan.instances import base_instances, sized
from provisioning.plan.judge import played
from provisioning.plan.loads import settled_batch
from provisioning.plan.scenario import scenario
from provisioning.plan.sensitivity import sensitivity
from provisioning.report.document import document
from provisioning.report.result import answer
from tests.support.provision import DECODING, SLO

MIXTRAL = {"slo": SLO, "model": "mixtral-8x7b", "adapters": 512, "request_rate": 70.0, "mean_output_tokens": 211.0}
MIXTRAL |= DECODING


def asked(**changes):
    return scenario(PlanFlags(**(MIXTRAL | changes)))


def gpus_in_all(flags):
    """Of the model's plan, LLM instances included; None where there is none."""
    chosen = smallest(sized(scenario(PlanFlags(**flags)))).chosen
    return None if chosen is None else chosen.all_gpus


def test_the_plan_is_for_the_load_that_was_asked_for():
    result = answer(asked(), seeds=0, price_per_gpu_hour=1.0)
    plan = document(result)
    load, step_s = plan["load"], plan["latency_us"]["decode_step"] * 1e-6
    assert (load["instances"], plan["gpus"]) == (2, 2)  # 24 instances and 4 GPUs, when LB was by the SLO's TPOT
    assert load["request_rate"] == 70 and load["global_batch"] == pytest.approx(70 * 211 * step_s)
    simulated = played(result.scenario, result.candidate.mean_step_us, seed=0)
    assert simulated.mean_rate() == pytest.approx(70, rel=0.03)
    assert plan["cost"]["total_per_million_tokens"] == pytest.approx(6 / (70 * 211 * 3600) * 1e6)


def test_a_looser_slo_never_buys_gpus():
    slos = [f"ttft_p95=250ms,tpot_avg={ms}ms" for ms in (50, 100, 200)]
    counts = [gpus_in_all(MIXTRAL | {"slo": slo, "request_rate": 20.0}) for slo in slos]
    assert counts == sorted(counts, reverse=True) and counts[0] <= 10


SMALL = {
    "model": ["mixtral-8x7b", "qwen3-30b-a3b", "gpt-oss-20b"], "gpu": ["h100", "hopper-96", "l40s"],
    "lora_rank": [16, 64], "adapters": [40, 1000], "zipf": [0.6, 1.4],
    "request_rate": [5.0, 20.0, 60.0], "prefill": ["apart", "shared"],
    "transport": ["nvshmem", "gpu", "tcp"], "eq6": ["stage", "printed"], "slo": [SLO, "ttft_p99=1s,tpot_avg=200ms"],
}  # fmt: skip


@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(6, 200))])
def test_no_other_number_of_instances_takes_fewer_gpus(seed):
    rng = random.Random(seed)
    flags = {"slo": SLO} | {name: rng.choice(values) for name, values in SMALL.items()}
    asked = scenario(PlanFlags(**flags, max_gpus=16))
    first, each, fewest = base_instances(asked), asked.model.instance_gpus, None
    for instances in range(first, 8 * first + 1):
        found = smallest(replace(asked, instances=instances, free_instances=False)).chosen
        fewest = min(filter(None, (fewest, found and found.all_gpus)), default=None)
        if fewest is not None and instances * each >= fewest:
            break
    found = smallest(sized(asked)).chosen
    assert (found and found.all_gpus) == fewest


def test_a_number_of_instances_that_doubling_steps_over_is_found():
    flags = {"slo": "ttft_p99=1s,tpot_avg=200ms", "model": "qwen3-30b-a3b", "gpu": "h200", "lora_rank": 256}
    flags |= {"zipf": 0.0, "adapters": 3000, "request_rate": 60.0, "mean_output_tokens": 64.0, "link_gbps": 50.0}
    found = sized(scenario(PlanFlags(**flags, transport="tcp", eq6="printed", **DECODING)))
    kept = [bool(smallest(replace(found, instances=number)).chosen) for number in (1, 2, 3, 4)]
    assert kept == [False, False, True, False] and found.instances == 3


def test_given_instances_and_batches_are_kept_to():
    chosen = smallest(sized(asked(instances=5))).chosen
    assert chosen is not None and chosen.scenario.instances == 5
    chosen = smallest(sized(asked(batch_size=40.0))).chosen
    assert chosen is not None and chosen.scenario.batch <= 40 * (1 + 1e-6)
    assert chosen.scenario.instances > 5
    few = smallest(sized(asked(instances=2, batch_size=None, request_rate=7000.0)))
    assert few.chosen is None and few.binding in ("kv", "tpot")


def test_a_step_of_little_and_a_rate_meet_where_they_balance():
    assert settled_batch(2.0, lambda batch: 10 + batch / 4, 1e3) == pytest.approx(40)
    assert settled_batch(2.0, lambda batch: 10 + max(batch - 5, 0) / 4, 1e3) == pytest.approx(35)
    assert settled_batch(2.0, lambda batch: 10 + batch, 50.0) == 50  # it never comes to rest


RANGES = {
    "model": ["gpt-oss-20b", "qwen3-30b-a3b", "mixtral-8x7b", "dbrx"], "gpu": ["h200", "h100", "hopper-96", "b200"],
    "adapters": [8, 40, 100, 200], "zipf": [0.0, 0.8, 1.2, 1.6], "lora_rank": [16, 64],
    "request_rate": [0.5, 5.0, 20.0, 60.0], "mean_output_tokens": [50.0, 250.0, 1000.0],
    "slo": [f"ttft_p{p}={ttft}ms,tpot_avg={tpot}ms" for p in (90, 99) for ttft in (60, 400) for tpot in (25, 50, 150)],
    "context_tokens": [500.0, 4000.0], "link_gbps": [100.0, 400.0], "dispatch": ["any", "any", "by-adapter"],
    "eq6": ["stage", "printed"], "prefill": ["shared", "apart"], "gpus_per_node": [8, 64],
    "transport": ["nvshmem", "nvshmem", "gpu", "tcp"],
}  # fmt: skip


def easier(flags):
    """(what, the same question made easier in one way)."""
    percentile, tpot = flags["slo"].split("=")[0], flags["slo"].rsplit("=", 1)[1]
    yield "looser TPOT", flags | {"slo": flags["slo"].replace(tpot, f"{1.3 * float(tpot[:-2])}ms")}
    yield "looser TTFT", flags | {"slo": f"{percentile}=900ms,tpot_avg={tpot}"}
    yield "lower percentile", flags | {"slo": flags["slo"].replace(percentile, "ttft_p80")}
    yield "fewer requests", flags | {"request_rate": 0.7 * flags["request_rate"]}
    yield "fewer adapters", flags | {"adapters": flags["adapters"] // 2}
    yield "faster link", flags | {"link_gbps": 1.5 * flags["link_gbps"]}
    yield "more memory", flags | {"gpu_memory_gib": 300.0, "instance_gpus": 4}


def fast(found):
    gpu = found.model.cluster.gpu
    faster = replace(gpu, hbm_gb_per_s=1.4 * gpu.hbm_gb_per_s, bf16_tflops=1.4 * gpu.bf16_tflops)
    return replace(found, model=replace(found.model, cluster=replace(found.model.cluster, gpu=faster)))


@pytest.mark.parametrize(("seed", "num"), [(14, 12), pytest.param(15, 50, marks=pytest.mark.long)])
def test_what_is_easier_never_costs_gpus(seed, num):
    """None simulated; each question beside eight easier ones."""
    rng, feasible = random.Random(seed), 0
    for _ in range(num):
        flags = {name: rng.choice(values) for name, values in RANGES.items()} | {"max_gpus": 12, "instance_gpus": 4}
        before = gpus_in_all(flags)
        changed = [(what, gpus_in_all(other)) for what, other in easier(flags)]
        quick = smallest(sized(fast(scenario(PlanFlags(**flags))))).chosen
        changed.append(("faster GPU", quick and quick.all_gpus))
        if before is not None:
            feasible += 1
            for what, after in changed:
                assert after is not None and after <= before, (what, before, after, flags)
    assert feasible >= num / 2


def test_the_busiest_instance_is_what_counts_where_adapters_are_assigned():
    """Zipf 1.2, 512 adapters: the hottest has 24 % of the requests, whatever the number of instances."""
    for instances, times in ((4, 1.0), (8, 1.92), (24, 5.77)):
        load = {"instances": instances, "batch_size": 32.0, "request_rate": None, "context_tokens": 8192.0}
        any_one, own = (asked(dispatch=name, **load) for name in ("any", "by-adapter"))
        assert any_one.loads.hottest == pytest.approx(times, abs=0.01)
        layout = smallest(any_one).closest.layout
        free, bound = evaluate(any_one, layout), evaluate(own, layout)
        assert free.scenario.busiest == 32 and bound.scenario.busiest > 32 * times * 0.95
        assert bound.scenario.global_batch == free.scenario.global_batch
        if times > 1.5:
            assert bound.step_us > free.step_us


def test_any_instance_meets_what_assigned_adapters_do_not():
    """Nearly twice the mean batch is more than the KV cache of the busiest holds, and more instances do not help it."""
    long = {"instances": 8, "batch_size": 100.0, "request_rate": None, "context_tokens": 8192.0}
    found = asked(**long)
    chosen = smallest(found).chosen
    assert chosen is not None and smallest(asked(dispatch="by-adapter", **long)).binding == "kv"
    assert next(row for row in sensitivity(found, chosen) if row.change == "dispatch by adapter").gpus is None
    rate = {"request_rate": 200.0, "context_tokens": 8192.0}
    assert gpus_in_all(MIXTRAL | rate) == 30 and gpus_in_all(MIXTRAL | rate | {"dispatch": "by-adapter"}) is None
    said = document(answer(found, seeds=0))
    assert said["load"]["hottest_over_mean_by_adapter"] == pytest.approx(1.92, abs=0.01)


PAPERS = {"slo": SLO, "adapters": 512, "instances": 4} | DECODING


@pytest.mark.parametrize(("flags", "paper", "tuned"), [
    ({"model": "qwen3-30b-a3b", "lora_rank": 32, "gpu": "hopper-96", "batch_size": 128.0}, 19, 32),
    ({"model": "gpt-oss-20b", "gpu": "h100", "batch_size": 64.0, "base_dtype": "mxfp4"}, 19, 22),
    ({"model": "gpt-oss-20b", "gpu": "h100", "batch_size": 64.0}, 11, 21),
])  # fmt: skip
def test_the_coupled_side_is_tuned(flags, paper, tuned):
    found = {}
    for split in ("paper", "0.5", "tuned"):
        question = scenario(PlanFlags(**PAPERS, **flags, coupled_split=split))
        found[split] = compare(question, smallest(question).chosen, seeds=0)
    assert found["paper"].split.slots == found["0.5"].split.slots == paper
    best = found["tuned"].split
    assert best.slots == tuned and best.admitted > found["paper"].split.admitted
    assert best.requests > found["tuned"].scenario.global_batch / found["tuned"].instances
    assert found["tuned"].gpus_needed < found["paper"].gpus_needed


def test_smaller_base_weights_leave_more_to_both_sides():
    loads = PAPERS | {"model": "gpt-oss-20b", "gpu": "h100", "batch_size": 64.0}
    kinds = [scenario(PlanFlags(**loads, base_dtype=name)) for name in ("bf16", "fp8", "mxfp4")]
    for left in ([found.model.free_bytes for found in kinds], [found.kv_requests for found in kinds]):
        assert left == sorted(left)
    assert kinds[2].model.base_step_us(64) < kinds[0].model.base_step_us(64)
    assert scenario(PlanFlags(**loads, prefill_tokens=16384.0)).kv_requests < kinds[0].kv_requests
