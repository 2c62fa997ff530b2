"""Properties of EPx-PPy placement over any model and any layout."""

import re
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_server import spec
from lora_server.control.members.agreement import require_work
from lora_server.errors import ConfigError
from lora_server.placement import Layout, Placement, share


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    layers, experts = draw(st.integers(1, 9)), draw(st.integers(1, 12))
    config = {"model_type": "qwen3_moe", "hidden_size": 8, "intermediate_size": 12, "moe_intermediate_size": 4}
    config |= {"num_experts": experts, "num_experts_per_tok": 1, "num_attention_heads": 2, "num_hidden_layers": layers}
    config["mlp_only_layers"] = draw(st.lists(st.integers(0, layers - 1), max_size=3))
    return Placement(spec.from_config(config), Layout(draw(st.integers(1, 6)), draw(st.integers(1, 6))))


@given(placements())
def test_every_expert_of_every_site_has_exactly_one_owner(placement: Placement):
    shards = range(placement.layout.num_shards)
    for site in placement.spec.sites():
        holders = Counter(expert for shard in shards for expert in placement.experts(site, shard))
        assert holders == dict.fromkeys(range(placement.spec.experts_at(site)), 1)
        for expert in holders:
            assert placement.owners(site, expert) == tuple(s for s in shards if expert in placement.experts(site, s))


@given(placements())
def test_layers_experts_and_dense_sites_are_balanced(placement: Placement):
    layout, model = placement.layout, placement.spec
    per_stage = Counter(layer % layout.pp for layer in range(model.layers))
    counts = [per_stage[stage] for stage in range(layout.pp)]
    assert max(counts) - min(counts) <= 1
    for site in model.sites():
        held = [len(placement.experts(site, shard)) for shard in layout.stage_shards(site.layer)]
        assert max(held) - min(held) <= 1
        if not model.is_dense(site):
            assert held == sorted(held, reverse=True)
    for shard in range(layout.num_shards):
        assert all(layer % layout.pp == layout.stage(shard) for layer in placement.layers(shard)), "interleaved"
    for stage in range(layout.pp):
        shards = range(stage * layout.ep, (stage + 1) * layout.ep)
        dense = [sum(model.is_dense(site) for site in placement.sites(shard)) for shard in shards]
        assert max(dense) - min(dense) <= 1


@given(placements(), st.integers(1, 4), st.integers(0, 4))
def test_twins_own_the_same_and_are_on_different_nodes(placement: Placement, replicas: int, more: int):
    layout = replace(placement.layout, replicas=replicas)
    replicated = replace(placement, layout=layout)
    for shard in range(layout.num_shards):
        first = shard % layout.width
        assert set(replicated.sites(shard)) == set(placement.sites(first))
        assert (layout.stage(shard), layout.ep_rank(shard)) == (layout.stage(first), layout.ep_rank(first))
    for site in placement.spec.sites():
        for expert in range(placement.spec.experts_at(site)):
            (owner,) = placement.owners(site, expert)
            assert replicated.owners(site, expert) == tuple(layout.twins(owner))
    nodes = min(replicas + more, layout.num_shards)
    blocks = [share(layout.num_shards, nodes, node) for node in range(nodes)]
    assert all(len({shard % layout.width for shard in block}) == len(block) for block in blocks)


@given(st.integers(0, 50), st.integers(1, 9))
def test_blocks_partition_the_range(total: int, parts: int):
    blocks = [share(total, parts, index) for index in range(parts)]
    assert [item for part in blocks for item in part] == list(range(total))


@given(placements())
def test_a_layout_is_refused_where_a_shard_would_own_nothing(placement: Placement):
    layout = placement.layout
    idle = sum(not placement.layers(shard) for shard in range(layout.num_shards))
    try:
        require_work(placement)
        assert idle == 0
    except ConfigError as error:
        assert idle and f"{idle} of {layout.num_shards} shards would own nothing" in str(error)
        fits = re.search(r"with pp(\d+), at most ep(\d+)", str(error))
        smaller = Layout(min(layout.ep, int(fits[2])), int(fits[1]))
        require_work(Placement(placement.spec, smaller))


def test_outside_the_model_is_an_error():
    placement = Placement(spec.PRESETS["mixtral-8x7b"], Layout(2, 2))
    with pytest.raises(IndexError):
        placement.owners(spec.Site(0, "gate_up"), 8)


@pytest.mark.parametrize("text", ["ep0-pp1", "ep2", "2x2", "ep2-pp2-dp1", "", "ep-1-pp2"])
def test_bad_layouts_are_refused(text: str):
    assert str(Layout.parse(" EP4-PP2 ")) == "ep4-pp2"
    with pytest.raises(ConfigError, match="layout"):
        Layout.parse(text)
