"""Table 1, Table 4, bytes by hand, memory of the fullest shard, profiles, and adapters as they are."""

import json
from dataclasses import replace

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from bench.profile import of_gpu_run
from lora_server import spec
from lora_server.adapters import WEIGHTS
from lora_server.placement import Layout, Placement
from provisioning.inputs import InputError
from provisioning.model import geometry, library, memory, profile, table1, table4
from provisioning.model.hardware import GPUS, Cluster
from provisioning.model.latency import StepModel, budget, served_us, violations
from provisioning.model.transports import TRANSPORTS
from provisioning.plan.candidates import candidates
from provisioning.plan.choice import smallest
from provisioning.report.provenance import provenance
from provisioning.workload.workload import zipf
from tests.support import provision as support
from tests.support.provision import SLO, provision, typed

MIXTRAL = spec.PRESETS["mixtral-8x7b"]


def test_table_1_as_printed():
    b, k, p, x, y = 128, 2, 2, 4, 2
    m = x * y
    dp, pp, ep, hybrid = (table1.volumes(name, b=b, k=k, p=p, x=x, y=y) for name in ("dp", "pp", "ep", "hybrid"))
    volumes = {"peer_volume": b * k / (p * m), "compute_volume": b * k / m}
    assert dp == table1.Volumes(peers_of_client=m, peers_of_server=p, sync_scope=m, **volumes)
    assert (pp.peer_volume, pp.peers_of_client, pp.compute_volume, pp.sync_scope) == (b * k / p, 1, b * k, 1)
    assert (ep.peer_volume, ep.peers_of_client, ep.compute_volume, ep.sync_scope) == (b * k / m, m / p, b * k / m, m)
    assert (hybrid.peer_volume, hybrid.peers_of_client) == (b * k / max(p, x), max(x / p, 1))
    assert (hybrid.compute_volume, hybrid.sync_scope) == (b * k / x, x)


@given(st.integers(1, 16), st.integers(1, 16))
def test_peers_of_both_ends_fit_the_volume(p, x):
    row = table1.hybrid(b=64, k=2, p=p, x=x)
    pairs = p * row.peers_of_client
    assert pairs == pytest.approx(x * row.peers_of_server) == max(p, x)
    assert pairs * row.peer_volume == pytest.approx(64 * 2)
    assert x * row.compute_volume == pytest.approx(64 * 2)


def test_table_1_rejects_nonsense():
    with pytest.raises(InputError, match="strategy"):
        table1.volumes("tp", b=1, k=1, p=1, x=1)
    with pytest.raises(InputError, match="b: "):
        table1.volumes("pp", b=0, k=1, p=1, x=1)


def test_table_4_in_and_out_of_sample():
    cells = table4.residuals()
    assert len(cells) == 32
    assert max(abs(cell.relative) for cell in cells if cell.in_sample) < 0.04
    outside = [abs(cell.relative) for cell in cells if not cell.in_sample]
    assert len(outside) == 12 and max(outside) < 0.18
    assert sorted(outside)[len(outside) // 2] < 0.08


def test_bytes_by_hand():
    h, f, r, b, k = MIXTRAL.hidden, MIXTRAL.ffn, 64, 8, 2
    paper = step_model(popularity=zipf(0, 1), once_per_shard=False).work.step(b, 1)
    assert paper.receive == 2 * b * k * (h + f)
    assert paper.send == 2 * b * k * (2 * f + h)
    ours = step_model(popularity=zipf(0, 1)).work.step(b, 1)
    assert ours.receive == 2 * (b * h + b * k * f)
    assert ours.send == 2 * (b * k * 2 * f + b * h)
    pair = 2 * r * (2 * h + 2 * f + f + h)
    expected = 8 * (1 - (1 - k / 8) ** b)
    assert ours.weights == pytest.approx(expected * pair)
    assert MIXTRAL.adapter_bytes(r) == MIXTRAL.layers * MIXTRAL.experts * pair


def test_a_token_reaches_between_one_and_k_shards():
    assert geometry.shard_tokens(experts=8, top_k=2, ep=1) == 1
    assert geometry.shard_tokens(experts=8, top_k=2, ep=8) == pytest.approx(2)
    assert geometry.shard_tokens(experts=8, top_k=2, ep=2) == pytest.approx(2 * (1 - 6 / 28))


small = st.integers(1, 5)


@settings(max_examples=40)
@given(st.integers(1, 7), st.integers(1, 9), small, small, st.lists(st.integers(0, 6), max_size=3), st.booleans())
def test_fullest_shard_counts_every_shard(layers, experts, ep, pp, dense, shared_a):
    config = {
        "model_type": "qwen3_moe", "num_hidden_layers": layers, "hidden_size": 4096, "intermediate_size": 9000,
        "moe_intermediate_size": 1024, "num_experts": experts, "num_experts_per_tok": 1, "num_attention_heads": 2,
        "mlp_only_layers": [layer for layer in dense if layer < layers],
    }  # fmt: skip
    model, layout = spec.from_config(config), Layout(ep, pp)
    placement = Placement(model, layout)
    by_shard = [memory._shard_bytes(placement, shard, 16, shared_a) for shard in range(layout.num_shards)]
    assert sum(by_shard) == model.adapter_bytes(16, shared_a=shared_a)
    paged = -(-max(by_shard) // memory.PAGE_BYTES) * memory.PAGE_BYTES
    assert memory.fullest_shard_bytes(model, layout, 16, shared_a) == paged


def test_cache_slots_follow_the_fullest_shard_not_the_total():
    cluster = Cluster(gpu=GPUS["h200"])
    even, uneven = (memory.cache_slots(MIXTRAL, Layout(ep, 1), cluster, 64) for ep in (2, 3))
    assert uneven == pytest.approx(even * 4 / 3, abs=1)  # 8 experts over 3 shards: the fullest has 3, not 8/3
    assert memory.cache_slots(MIXTRAL, Layout(8, 1), cluster, 64) == pytest.approx(4 * even, abs=4)


def test_paper_memory_figures():
    cluster = Cluster(gpu=GPUS["hopper-96"], gpus_per_node=4)
    assert MIXTRAL.adapter_bytes(64) / 2**30 == pytest.approx(1.69, abs=0.005)
    assert MIXTRAL.adapter_bytes(64, shared_a=True) / 2**30 == pytest.approx(1.56, abs=0.005)
    assert memory.cache_slots(MIXTRAL, Layout(2, 1), cluster, 64) == pytest.approx(104, abs=1)  # section 6.4
    of_an_instance = memory.adapters_in(memory.instance_free_bytes(MIXTRAL, cluster, 2) / 2, MIXTRAL, 64)
    assert of_an_instance == pytest.approx(25, abs=2)  # 100 over four instances


def test_layouts_give_every_shard_something():
    assert {str(layout) for layout in memory.layouts(MIXTRAL, 8)} == {"ep1-pp8", "ep2-pp4", "ep4-pp2", "ep8-pp1"}
    assert {str(layout) for layout in memory.layouts(MIXTRAL, 64)} == {"ep2-pp32", "ep4-pp16", "ep8-pp8"}
    assert list(memory.layouts(MIXTRAL, 257)) == []


def step_model(**changes):
    options = {"spec": MIXTRAL, "cluster": Cluster(gpu=GPUS["h200"]), "popularity": zipf(1.2, 512)}
    return StepModel(**(options | {"lora_rank": 64, "instance_gpus": 2} | changes))


def test_more_batch_takes_longer_and_more_shards_compute_faster():
    model = step_model()
    times = [model.lora(batch, Layout(2, 2)).total for batch in (1, 16, 64, 256)]
    assert times == sorted(times)
    assert model.lora(64, Layout(4, 1)).compute.value < model.lora(64, Layout(1, 4)).compute.value


def test_an_8_bit_wire_nearly_halves_what_the_link_takes():
    changes = {}, {"wire": "e4m3"}, {"cluster": Cluster(gpu=GPUS["h200"], link_gbps=1e12)}
    exact, eight, free = (step_model(**one).lora(128, Layout(2, 1)) for one in changes)
    for name in ("receive", "send"):
        alone = getattr(free, name).value
        half = (getattr(exact, name).value - alone) / 2
        assert half < getattr(eight, name).value - alone < 1.07 * half, "and what its conversion takes"
    assert eight.compute == exact.compute


def test_eq_5_and_eq_6():
    model = step_model()
    latency, limit = model.lora(64, Layout(2, 1)), budget(model, 64, 100_000)
    assert limit.layer == 100_000 / 32
    assert limit.ffn == limit.layer - model.base.attention_us(64).value
    assert violations(latency, limit, 4 * latency.longest) == []
    assert violations(latency, budget(model, 64, 32 * latency.total), latency.longest) == ["eq5:compute"]
    instances = int(limit.layer / latency.longest) + 1
    assert violations(latency, limit, instances * latency.longest) == ["eq6:compute"]


def test_eq_5_says_that_the_step_meets_the_tpot():
    model = step_model()
    for batch in (1.0, 64.0, 500.0):
        for tpot_us in (15e3, 25e3, 60e3):
            latency = model.lora(batch, Layout(2, 1))
            meets = model.step_us(batch, Layout(2, 1)) <= tpot_us
            fits = not violations(latency, budget(model, batch, tpot_us), latency.longest)
            assert meets == (fits and model.base_step_us(batch) <= tpot_us)


def test_eq_6_per_stage_counts_the_layers_of_the_fullest_stage():
    latency = step_model().lora(64, Layout(2, 1))
    for pp, layers in ((1, 32), (2, 16), (3, 11), (32, 1)):
        busy = served_us(latency, Layout(2, pp), 32, 4)
        assert busy * 32 == pytest.approx(4 * latency.longest * layers)
        assert served_us(latency, Layout(2, pp), 32, 4, "printed") == pytest.approx(4 * latency.longest)


OF = {"model": "mixtral-8x7b", "gpu": "h200", "lora_rank": 64, "wire": "exact", "transport": "nvshmem"}


def write_profile(folder, **of):
    rows = [{"ep": ep, "batch": batch, "us": us} for ep in (1, 2) for batch, us in ((32, 100.0), (64, 140.0))]
    path = folder / "measured.json"
    path.write_text(json.dumps({"source": "here", "of": OF | of, "terms": {"compute": rows}}))
    return path


@pytest.mark.parametrize(("flags", "of"), [
    ({"gpu": "h100"}, {}), ({"lora_rank": 32}, {}), ({"wire": "e4m3"}, {}), ({"transport": "tcp"}, {}),
    ({"model": "dbrx"}, {}), ({"link_gbps": 100.0}, {"link_gbps": 400.0}),
], ids=str)  # fmt: skip
def test_a_profile_of_something_else_is_refused(tmp_path, flags, of):
    path = write_profile(tmp_path, **of)
    assert support.question(profile=path).model.profile.points
    with pytest.raises(InputError, match=f"measured with {next(iter(flags))} .*give --{next(iter(flags))[:4]}"):
        support.question(profile=path, **flags)
    asked = {**OF, "link_gbps": 400.0} | flags
    assert not profile.shipped(asked, tmp_path).points and profile.shipped(asked | OF | of, tmp_path).points


def test_what_make_gpu_found_is_read_as_a_profile(tmp_path):
    lines = [{"kind": "hardware", "gpu": "NVIDIA H200"}, {"kind": "headline", "tokens": 128, "us": 90.5}]
    (tmp_path / "headline.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    (tmp_path / "p.json").write_text(json.dumps(of_gpu_run(tmp_path, "nvshmem")))
    known = support.question(profile=tmp_path / "p.json").model.lora(128, Layout(4, 1)).compute
    assert (known.value, known.kind) == (90.5, "measured")


def test_stages_of_one_phase_are_added_in_eq_6():
    apart, joined = (step_model(transport=TRANSPORTS[name]).lora(64, Layout(2, 1)) for name in ("nvshmem", "gpu"))
    assert apart.longest == apart.compute.value and apart.total == joined.total
    assert joined.longest == joined.compute.value + joined.send.value and joined.worst == "compute"


def test_a_transport_has_its_own_link_hosts_and_reach():
    one_host = {"instances": 1, "gpus_per_node": 8, "prefill": "apart"}
    plans = {name: smallest(support.question(transport=name, **one_host)).chosen for name in TRANSPORTS}
    times = {name: plan.latency.total for name, plan in plans.items()}
    assert times["gpu"] < times["nvshmem"] < times["tcp"] and times["gpu"] < times["cuda_ipc"] < times["shm"]
    links = {name: plan.scenario.model.cluster.link_gbps for name, plan in plans.items()}
    assert links == {"nvshmem": 400, "gpu": 3600, "cuda_ipc": 3600, "shm": 400, "tcp": 25}
    coupled = {plan.scenario.model.coupled_lora_us(64).value for plan in plans.values()}
    assert len(coupled) == 1, "no transport has a part in it"
    with pytest.raises(InputError, match="--transport: got 'auto', expected one of nvshmem, gpu"):
        support.question(transport="auto")


def test_an_engine_waits_for_a_round_trip_at_each_site_but_nothing_is_busy_with_it():
    asked = {"transport": "tcp", "prefill": "apart"}
    changes = {}, {"round_trip_us": 0}, {"round_trip_us": 400}
    own, none, slow = (support.question(**asked, **more).model for more in changes)
    layout = Layout(2, 1)
    alone = none.lora(64, layout)
    for model, one_us in ((own, 50), (slow, 400)):
        found = model.lora(64, layout)
        assert found.total - alone.total == pytest.approx(2 * one_us) and found.longest == alone.longest
        everywhere = replace(model, efficiency=model.efficiency.with_attention()).lora(64, layout)
        assert everywhere.round_trips_us == 4 * one_us
    with pytest.raises(InputError, match="--round-trip-us: got -1"):
        support.question(round_trip_us=-1, **asked)


def test_gpus_of_a_tensor_parallel_engine_each_send_every_hidden_row():
    ep, tp = (step_model(tensor_parallel=tp, instance_gpus=4).work.step(64, 2) for tp in (False, True))
    hidden = 3 * 2 * 64 * 2 * (1 - 6 / 28) * 4096  # three more copies of what goes once to each shard
    assert tp.receive - ep.receive == pytest.approx(hidden) and tp.send - ep.send == pytest.approx(hidden)


def test_a_shorter_wire_costs_its_conversion():
    """On hosts that is longer than the link takes for the bytes that it saves."""
    one, layout = {"wire": "e4m3"}, Layout(2, 1)
    for name, helps in (("nvshmem", True), ("shm", False), ("tcp", False)):
        transport = TRANSPORTS[name]
        cluster = replace(step_model().cluster, link_gbps=transport.link_gbps(GPUS["h200"], 400.0, 50.0))
        exact, short = (step_model(transport=transport, cluster=cluster, **wire) for wire in ({}, one))
        times = [model.work.step(64, 2).receive / model.work.nics_bytes_per_us(2) for model in (exact, short)]
        assert (times[1] < times[0]) == helps
        assert times[1] > times[0] / 2 and short.lora(64, layout).total != exact.lora(64, layout).total


def test_prompts_on_the_links_by_hand():
    """Mixtral: a token's gate_up rows go to 2 (1 - 6/28) of two shards, each of its 2 experts has rows of down."""
    once, rank = 2 * (1 - 6 / 28) * 4096 * 2, 2 * 14336 * 2
    found = step_model(prompt_tokens=896.0, output_tokens=256.0, prefill_tokens=2048.0)
    token, link = found.prompt(2), 2 * found.cluster.link_bytes_per_us
    assert (token.receive_bytes, token.send_bytes) == pytest.approx((once + rank, 2 * rank + once))
    assert token.served.send.value == pytest.approx((2 * rank + once) / link)
    layout, n = Layout(2, 1), 64 * 896 / 256
    decoding, both = found.lora(64, layout), found.served(64, layout)
    assert both.send.value == pytest.approx(decoding.send.value + n * token.served.send.value)
    limit, without = budget(found, 64, 1e5, 2), budget(found.without_prompts(), 64, 1e5, 2)
    assert without.ffn - limit.ffn == pytest.approx(n * token.layer_us) and token.layer_us > token.lora.total
    assert found.step_us(64, layout) - found.without_prompts().step_us(64, layout) >= 32 * n * token.layer_us * 0.999
    assert found.without_prompts().served(64, layout) == decoding
    wide = step_model(prompt_tokens=896.0, instance_gpus=1).prompt(4)
    assert wide.lora.send.value == pytest.approx(4 * wide.served.send.value), "one client's link, four of the server's"


def test_a_profile_overrides_each_term(tmp_path):
    rows = [{"ep": 2, "batch": 32, "us": 100.0}, {"ep": 2, "batch": 64, "us": 140.0}]
    falling = [{"batch": 32, "us": 100.0}, {"batch": 64, "us": 10.0}]
    terms = {"receive": rows, "base_ffn": [{"batch": 64, "us": 500}], "base_attention": falling}
    (tmp_path / "profile.json").write_text(json.dumps({"source": "here", "of": OF, "terms": terms}))
    model = step_model(profile=profile.load(tmp_path / "profile.json"))
    known = model.lora(64, Layout(2, 1)).receive
    assert (known.value, known.kind) == (140.0, "measured")
    between = model.lora(48, Layout(2, 1)).receive
    assert (between.value, between.kind) == (pytest.approx(120.0), "extrapolated")
    assert model.lora(128, Layout(2, 1)).receive.value == pytest.approx(220.0)
    assert model.lora(64, Layout(4, 1)).receive.value == step_model().lora(64, Layout(4, 1)).receive.value
    assert model.base.ffn_us(64) == (500, "measured", "profile.json: here")
    assert model.base.attention_us(256).value == 10.0, "a time that falls with the batch never comes to zero"


MACHINE = {"memory_gib": 8.0, "memory_gb_per_s": 10.0, "tflops": 0.05, "load_gb_per_s": 2.0}


def machine_profile(folder, **machine):
    """Of a core without a preset: one and two engines, one shard, chunks of 100 prompt tokens."""
    step = {"receive": 10.0, "compute": 100.0, "send": 20.0, "exposed": 5.0}
    terms = {}
    for term, us in step.items():
        terms[term] = [{"ep": 1, "batch": b, "engines": n, "us": us * b * n} for b in (1, 8, 64) for n in (1, 2)]
        terms[f"prompt_{term}"] = [{"ep": 1, "batch": 100, "us": us}]
    for name, us in (("ffn", 50.0), ("attention", 30.0)):
        terms |= {f"base_{name}": [{"batch": b, "us": us * b} for b in (1, 64)]}
        terms |= {f"prompt_{name}": [{"batch": 100, "us": us}]}
    of = OF | {"model": spec.PRESETS["small-mixtral"].geometry, "gpu": "cpu", "lora_rank": 16, "transport": "shm"}
    written = {"source": "here", "of": of, "machine": MACHINE | machine, "terms": terms}
    (folder / "cpu.json").write_text(json.dumps(written))
    return folder / "cpu.json"


ON_CORE = {"model": "small-mixtral", "gpu": "cpu", "lora_rank": 16, "transport": "shm", "batch_size": 8.0}


def test_a_profile_brings_a_machine_without_a_preset(tmp_path):
    asked = support.question(profile=machine_profile(tmp_path), instances=2, prompt_tokens=100.0, **ON_CORE)
    model, one = asked.model, Layout(1, 1)
    assert model.cluster.adapter_memory_bytes == 8 * 2**30 and model.cluster.host_link_gb_per_s == 2.0
    assert [model.lora(8, one, engines).total for engines in (1, 2, 3)] == pytest.approx([1040, 2080, 3120])
    prompts = model.prompts(8) * (0.3 + 1.3 + 0.05)  # of a token: attention, the longer of FFN and LoRA, what shows
    served = 2 * (1040 + model.prompts(8) * 1.3 - 80 - model.prompts(8) * 0.1)  # receive is another phase
    assert model.step_us(8, one, 2) == pytest.approx(4 * max(240 + 2080 + 80 + prompts, served))
    assert budget(model, 8, 4e4, 1, 2).ffn == pytest.approx(1e4 - 240 - 80 - prompts)
    assert {str(item.layout) for item in candidates(asked, 4)} == {"ep1-pp4"}, "of ep 2 and 4 nothing was measured"
    kinds = {name: entry.kind for name, entry in provenance(asked, candidates(asked, 4)[0]).items()}
    assert {kinds[name] for name in ("latency_us.compute", "hbm_gb_per_s", "gpu_memory_bytes")} == {"measured"}


@pytest.mark.parametrize("machine", [{"tflops": -1.0}, {"tflops": 0.0}, {"memory_gib": float("inf")}, {"cores": 2}])
def test_a_machine_that_cannot_be_is_refused(tmp_path, machine):
    with pytest.raises(InputError, match="machine: "):
        profile.load(machine_profile(tmp_path, **machine))


def test_the_package_has_a_measured_profile_of_a_cpu():
    """It is used without --profile, and a plan is made of measured terms."""
    chosen = smallest(support.question(**ON_CORE, adapters=50, instances=2, slo="ttft_p95=2s,tpot_avg=1s")).chosen
    assert chosen is not None and chosen.latency.compute.kind == "measured"


def test_dense_models_have_one_expert():
    config = {"model_type": "llama", "num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4}
    config["intermediate_size"] = 128
    model = step_model(spec=spec.from_config(config))
    assert model.lora(8, Layout(1, 2)).total > 0
    assert {str(layout) for layout in memory.layouts(model.spec, 4)} == {"ep1-pp4"}


TINY = {
    "model_type": "mixtral", "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip
WIDTHS = {"w1": (64, 96), "w3": (64, 96), "w2": (96, 64)}  # in, out
LAYER = "base_model.model.model.layers.{}"


def adapter(path, rank, *, attention=False, experts=True):
    """On all experts, on q and o, or on both, with zeros."""
    sites = {}
    for layer in range(2):
        at = LAYER.format(layer)
        if experts:
            sites |= {f"{at}.block_sparse_moe.experts.{e}.{w}": io for e in range(4) for w, io in WIDTHS.items()}
        if attention:
            sites |= {f"{at}.self_attn.q_proj": (64, 64), f"{at}.self_attn.o_proj": (64, 64)}
    path.mkdir(parents=True)
    tensors = {}
    for name, (columns, rows) in sites.items():
        tensors[f"{name}.lora_A.weight"] = np.zeros((rank, columns), np.float32)
        tensors[f"{name}.lora_B.weight"] = np.zeros((rows, rank), np.float32)
    save_file(tensors, path / WEIGHTS)
    (path / "adapter_config.json").write_text(json.dumps({"r": rank, "lora_alpha": 8}))


@pytest.fixture
def model(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(TINY))
    return str(tmp_path / "model")


def question(model, source, **given):
    given = {"adapters": None, "instances": 2, "batch_size": 8.0} | given
    return support.question(model=model, from_adapters=source and str(source), **given)


def test_adapters_of_one_rank_on_all_experts_are_what_the_rank_says(tmp_path, model):
    for name in ("code", "law", "med"):
        adapter(tmp_path / "adapters" / name, 8)
    (tmp_path / "adapters" / "notes").mkdir()
    asked = question(model, tmp_path / "adapters")
    assert asked.workload.num_adapters == 3 and asked.model.lora_rank == pytest.approx(8)
    assert asked.model.attention_share == 0
    plain = question(model, None, adapters=3, lora_rank=8)
    assert asked.steps.lora(Layout(2, 1)).total == pytest.approx(plain.steps.lora(Layout(2, 1)).total)


def test_mixed_ranks_are_weighed_by_who_is_called(tmp_path, model):
    adapter(tmp_path / "adapters" / "small", 4)
    adapter(tmp_path / "adapters" / "large", 64)
    (tmp_path / "hot.csv").write_text("large,9\nsmall,1\n")
    (tmp_path / "cold.csv").write_text("large,1\nsmall,9\n")
    assert question(model, tmp_path / "adapters").model.lora_rank == pytest.approx(34)
    hot = question(model, tmp_path / "adapters", counts=tmp_path / "hot.csv")
    assert hot.model.lora_rank == pytest.approx(0.9 * 64 + 0.1 * 4) and hot.workload.names == ("large", "small")
    assert question(model, tmp_path / "adapters", counts=tmp_path / "cold.csv").model.lora_rank == pytest.approx(34)
    assert hot.workload.ranks == f"ranks 4 to 64 ({tmp_path / 'adapters'})"


def test_attention_takes_memory_and_time(tmp_path, model):
    adapter(tmp_path / "both" / "law", 8, attention=True)
    adapter(tmp_path / "experts" / "law", 8)
    adapter(tmp_path / "only" / "law", 8, attention=True, experts=False)
    both, experts, only = (question(model, tmp_path / name) for name in ("both", "experts", "only"))
    tiny, layout = spec.load(model), Layout(1, 1)
    in_all = tiny.adapter_bytes(8) + 2 * 2 * 2 * 8 * (64 + 64)
    assert tiny.adapter_bytes(both.model.lora_rank) == pytest.approx(in_all, abs=2)
    assert only.model.lora_rank < 1.1 and memory.fullest_shard_bytes(tiny, layout, only.model.lora_rank) == 2 << 20
    assert both.model.attention_share == only.model.attention_share == 1
    rows = 8 * 2 * (64 + tiny.q_width)
    link = both.model.cluster.link_bytes_per_us
    wire = both.steps.lora(layout).receive.value - 2 * experts.steps.lora(layout).receive.value
    assert wire == pytest.approx(rows / link - (experts.steps.lora(layout).receive.value - 55.2))
    assert both.steps.lora(layout).send.value > experts.steps.lora(layout).send.value


def test_the_command_and_a_list_of_a_server(tmp_path, model):
    adapter(tmp_path / "adapters" / "law", 8, attention=True)
    asked = typed(slo=SLO, model=model, instances=2, batch_size=8, from_adapters=tmp_path / "adapters")
    shown = provision(*asked, "--no-simulate")
    assert shown.exit_code == 0, shown.output
    assert f"1 adapter of rank 8 ({tmp_path / 'adapters'})" in shown.stdout
    rows = [{"name": "law", "lora_rank": 16, "bytes": 2 * spec.load(model).adapter_bytes(8)}]
    (tmp_path / "list.json").write_text(json.dumps(rows))
    assert question(model, tmp_path / "list.json").model.lora_rank == pytest.approx(16)
    refused = {"name": "bad", "lora_rank": 0, "bytes": 0, "state": "refused"}
    (tmp_path / "list.json").write_text(json.dumps([row | {"dtype": "float32"} for row in (*rows, refused)]))
    served = question(model, tmp_path / "list.json")
    assert served.model.lora_rank == pytest.approx(8) and served.workload.names == ("law",)


def test_what_is_emitted_names_adapters_that_are_there(tmp_path, model):
    for name in ("code", "law", "med"):
        adapter(tmp_path / "adapters" / name, 8)
    asked = typed(slo=SLO, model=model, instances=2, batch_size=8, instance_gpus=2, from_adapters=tmp_path / "adapters")
    done = provision(*asked, "--no-simulate", "--emit", tmp_path / "out")
    assert done.exit_code == 0, done.output
    lines = (tmp_path / "out" / "trace.csv").read_text().splitlines()[1:]
    assert {line.split(",")[1] for line in lines} == {"code", "law", "med"}
    commands = (tmp_path / "out" / "commands.sh").read_text()
    assert commands.count("--tensor-parallel-size 2 --enable-expert-parallel\n") == 2
    settings = yaml.safe_load((tmp_path / "out" / "plan.yaml").read_text())
    assert settings["device_pool"] == 3 * memory.fullest_shard_bytes(spec.load(model), Layout(1, 1), 8.0)


@pytest.mark.parametrize(("make", "said"), [
    (lambda path: path.mkdir(), "holds no adapters"),
    (lambda path: (adapter(path / "law", 8), (path / "law" / WEIGHTS).write_bytes(b"\xff" * 20)),
     "law cannot be read as a PEFT adapter"),
    (lambda path: path.write_text("{}"), "holds no adapters"),
    (lambda path: path.write_text('[{"name": "law"}]'), "lora-server adapters list --json"),
    (lambda path: path.write_text('[{"name": "law", "bytes": 0, "lora_rank": 1}]'), "'law' has no weights"),
    (lambda path: None, "is no directory, no file and no HOST:PORT"),
])  # fmt: skip
def test_what_cannot_be_read_is_refused(tmp_path, make, said):
    make(tmp_path / "adapters")
    with pytest.raises(InputError, match=f"^--from-adapters: .*{said}"):
        library.read(str(tmp_path / "adapters"))
    with pytest.raises(InputError, match=r"^--from-adapters: 127.0.0.1:1: [^\n]+$"):
        library.read("127.0.0.1:1")  # a server that does not answer


def test_who_is_called_must_be_there(tmp_path, model):
    adapter(tmp_path / "adapters" / "law", 8)
    (tmp_path / "c.csv").write_text("code,9\n")
    with pytest.raises(InputError, match=r"^--from-adapters: .* has no adapter 'code', which is called"):
        question(model, tmp_path / "adapters", counts=tmp_path / "c.csv")
    with pytest.raises(InputError, match=r"^--adapters: got 2, but .* has 1"):
        question(model, tmp_path / "adapters", adapters=2)
