"""Geometry from configs and presets, and the adapter sizes that follow from it."""

import dataclasses
import json

import pytest

from lora_server import spec
from lora_server.errors import ConfigError
from lora_server.spec import ModelSpec, Site

MIXTRAL = {
    "model_type": "mixtral", "num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336,
    "num_local_experts": 8, "num_experts_per_tok": 2, "num_attention_heads": 32, "num_key_value_heads": 8,
}  # fmt: skip
QWEN3 = {
    "model_type": "qwen3_moe", "num_hidden_layers": 8, "hidden_size": 2048, "intermediate_size": 6144,
    "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "mlp_only_layers": [1], "decoder_sparse_step": 2,
}  # fmt: skip
DBRX = {
    "model_type": "dbrx", "d_model": 6144, "n_heads": 48, "n_layers": 40,
    "ffn_config": {"ffn_hidden_size": 10752, "moe_num_experts": 16, "moe_top_k": 4},
    "attn_config": {"kv_n_heads": 8},
}  # fmt: skip


@pytest.mark.parametrize("preset", spec.PRESETS.values(), ids=lambda preset: preset.name)
def test_adapter_bytes_equal_the_sum_over_every_matrix(preset: ModelSpec):
    def count(shared_a: bool) -> int:
        total = 0
        for site in preset.sites():
            for _expert in range(preset.experts_at(site)):
                for index, section in enumerate(preset.sections(site)):
                    total += 16 * (section.end - section.begin)
                    total += 16 * preset.in_width(site) if index == 0 or not shared_a else 0
        return 2 * total

    everywhere = {"projections": spec.PROJECTIONS}
    assert preset.adapter_bytes(16, **everywhere) == count(False)
    assert preset.adapter_bytes(16, shared_a=True, **everywhere) == count(True)


@pytest.mark.parametrize(("config", "name"), [(MIXTRAL, "mixtral-8x7b"), (DBRX, "dbrx")])
def test_a_config_equals_its_preset(config, name):
    assert spec.from_config(config).fingerprint() == spec.PRESETS[name].fingerprint()


def test_dense_layers_of_a_moe_model():
    model = spec.from_config(QWEN3)
    assert model.moe_layers == (3, 5, 7)
    dense, sparse = Site(0, "gate_up"), Site(3, "gate_up")
    assert (model.experts_at(dense), model.out_width(dense)) == (1, 2 * 6144)
    assert (model.experts_at(sparse), model.out_width(sparse)) == (128, 2 * 768)
    assert model.is_dense(dense)
    assert not model.is_dense(sparse)


def test_dense_model_has_one_expert_everywhere():
    config = {key: value for key, value in MIXTRAL.items() if not key.startswith("num_local")}
    model = spec.from_config(config | {"model_type": "llama", "num_key_value_heads": None})
    assert model.moe_layers == ()
    assert {model.experts_at(site) for site in model.sites()} == {1}
    assert model.sections(Site(0, "qkv"))[-1] == ("v", 8192, 12288)


def test_json_keeps_everything_and_the_fingerprint_all_but_the_name():
    for preset in spec.PRESETS.values():
        assert ModelSpec.from_json(preset.to_json()) == preset
        assert dataclasses.replace(preset, name="other").fingerprint() == preset.fingerprint()
        assert dataclasses.replace(preset, ffn=1).fingerprint() != preset.fingerprint()


@pytest.mark.parametrize(("change", "words"), [
    ({"model_type": "bert"}, "model_type"),
    ({"hidden_size": 0}, "hidden_size"),
    ({"hidden_size": "4096"}, "hidden_size"),
    ({"num_hidden_layers": None}, "num_hidden_layers"),
    ({"num_experts_per_tok": 9}, "at most 8"),
    ({"num_attention_heads": 31}, "head_dim"),
])  # fmt: skip
def test_bad_configs_name_the_field(change, words):
    with pytest.raises(ConfigError, match=words):
        spec.from_config(MIXTRAL | change)


def test_load_reads_a_directory_or_a_preset(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MIXTRAL))
    assert spec.load(tmp_path).fingerprint() == spec.load("mixtral-8x7b").fingerprint()
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="JSON"):
        spec.load(tmp_path)
    with pytest.raises(ConfigError, match=r"no config\.json"):
        spec.load(tmp_path / "nowhere")
