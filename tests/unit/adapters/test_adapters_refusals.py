"""What cannot be served exactly is refused, by name, with what was got and what was expected."""

import pytest
import torch

from lora_server import spec as specs
from lora_server.adapters import open_adapter, validate_adapter
from lora_server.demo import tiny
from tests.support.adapter_files import CONFIG, LAYERS, W1, Q, good, refused, spec_of

FUSED = f"{LAYERS}.0.mlp.experts"


NOT_SERVED = {
    **dict.fromkeys(("lora_bias", "fan_in_fan_out", "use_qalora", "use_something_new"), True),
    "trainable_token_indices": [3], "layer_replication": [[0, 2], [1, 4]], "use_bdlora": {"nblocks": 2},
    "megatron_config": {"tp": 2}, "arrow_config": {"top_k": 2}, "kasa_config": {"beta": 1},
    "monteclora_config": {"num_samples": 2},
}  # fmt: skip
CONFIGS = [
    *(({field: value}, [field]) for field, value in NOT_SERVED.items()),
    *(({"r": n}, ["r: ", f"got {n!r}", "integer from 1 to 1024"]) for n in ("8", 0, -4, 1025, True, 4.0, None)),
    *(({"lora_alpha": n}, ["lora_alpha", f"got {n!r}"]) for n in ("16", float("nan"), float("inf"), None)),
    ({"use_dora": True}, ["use_dora", "True", "DoRA"]),
    ({"use_dora": "no"}, ["use_dora", "'no'"]),
    ({"bias": "all"}, ["bias", "'all'", "'none'"]),
    ({"bias": "lora_only"}, ["bias", "'lora_only'"]),
    ({"modules_to_save": ["lm_head"]}, ["modules_to_save", "lm_head"]),
    ({"alora_invocation_tokens": []}, ["alora_invocation_tokens", "[]", "token ids"]),
    ({"alora_invocation_tokens": [1, -2]}, ["alora_invocation_tokens", "[1, -2]", "token ids"]),
    ({"alora_invocation_tokens": "go"}, ["alora_invocation_tokens", "go", "token ids"]),
    ({"invocation_string": ""}, ["invocation_string", "a text"]),
    ({"invocation_string": 3}, ["invocation_string", "3", "a text"]),
    *(({"init_lora_weights": n}, ["init_lora_weights", n]) for n in ("pissa", "pissa_niter_4", "olora", "corda")),
    *(({"init_lora_weights": n}, ["init_lora_weights", n]) for n in ("loftq", "lora_ga", "unheard_of")),
    ({"peft_type": "IA3"}, ["peft_type", "'IA3'", "'LORA'"]),
    ({"peft_type": None}, ["peft_type", "None"]),
    ({"lora_alpha": 10**400}, ["lora_alpha"]),
    ({"use_rslora": "yes"}, ["use_rslora", "'yes'"]),
    ({"rank_pattern": {"q_proj": 0}}, ["rank_pattern['q_proj']", "got 0"]),
    ({"rank_pattern": {"q_proj": "8"}}, ["rank_pattern['q_proj']"]),
    ({"rank_pattern": ["q_proj"]}, ["rank_pattern"]),
    ({"rank_pattern": {"(": 4}}, ["rank_pattern", "'('"]),
    ({"rank_pattern": {"(a)(?=b)": 4}}, ["rank_pattern", "looking ahead"]),
    ({"rank_pattern": {r"(a)\1": 4}}, ["rank_pattern", "references to groups"]),
    ({"rank_pattern": {"a{,3}": 4}}, ["rank_pattern", "with {,"]),
    ({"rank_pattern": {"a" * 1001: 4}}, ["rank_pattern", "1000 characters"]),
    ({"rank_pattern": {f"a{n}.*": 4 for n in range(257)}}, ["rank_pattern", "at most 256"]),
    ({"alora_invocation_tokens": [1] * 5000}, ["alora_invocation_tokens", "1 to 4096"]),
    ({"alpha_pattern": {"q_proj": float("nan")}}, ["alpha_pattern['q_proj']", "nan"]),
    ({"target_parameters": "experts"}, ["target_parameters", "list"]),
    ({"target_modules": {"q": 1}}, ["target_modules"]),
    ({"base_model_name_or_path": 3}, ["base_model_name_or_path"]),
    ({"r": 8}, [f"{Q}.lora_A.weight", "[4, 64]", "[8, 64]", "lora_rank 8"]),
    ({"rank_pattern": {"w1": 2}}, [f"{W1}.lora_A.weight", "[4, 64]", "[2, 64]"]),
    ({"exclude_modules": ["q_proj"]}, [Q, "exclude_modules"]),
    ({"exclude_modules": ".*w1"}, [W1, "exclude_modules"]),
    ({"layers_to_transform": [0]}, [W1, "layer 1", "[0]"]),
    ({"layers_to_transform": "0"}, ["layers_to_transform", "'0'"]),
]


@pytest.mark.parametrize(("change", "parts"), CONFIGS, ids=lambda value: str(value)[:60])
def test_a_config_that_changes_the_result_or_makes_no_sense(change, parts, tmp_path):
    tiny.write_adapter(tmp_path, good(), CONFIG | change)
    refused(tmp_path, *parts)


@pytest.mark.parametrize(
    "change",
    [{}]
    + [{"init_lora_weights": n} for n in (True, False, "gaussian", "eva", "orthogonal", "mica")]
    + [{"lora_dropout": 0.1}, {"modules_to_save": []}, {"rank_pattern": None}, {"loftq_config": {}}]
    + [{"layers_to_transform": [0, 1]}, {"layers_to_transform": None}, {"target_modules": "all-linear"}]
    + [{"auto_mapping": {"base_model_class": "X", "parent_library": "no_such_module"}}, {"exclude_modules": ["k"]}],
    ids=str,
)
def test_a_config_that_changes_nothing_is_accepted(change, tmp_path):
    tiny.write_adapter(tmp_path, good(), CONFIG | change)
    adapter, version = validate_adapter(tmp_path, spec_of())
    with adapter:
        assert len(version) == 64 and adapter.warnings == () and adapter.lora_rank == 4


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"3", b"\xff\xfe", b"[" * 100_000, b'{"r": ' + b"9" * 5000 + b"}"])
def test_a_config_that_is_not_an_object(text, tmp_path):
    tiny.write_adapter(tmp_path, good(), CONFIG)
    (tmp_path / "adapter_config.json").write_bytes(text)
    refused(tmp_path, "adapter_config.json")


def test_warnings_say_what_is_unusual_but_harmless(tmp_path):
    change = {"base_model_name_or_path": "org/other", "my_note": "x", "target_modules": ["q_proj"]}
    tiny.write_adapter(tmp_path, good(), CONFIG | change)
    (tmp_path / "new_embeddings.safetensors").write_bytes(b"")
    with open_adapter(tmp_path, spec_of()) as adapter:
        text = "\n".join(adapter.warnings)
        assert adapter.base_model == "org/other"
        assert adapter.experts(specs.Site(1, "gate_up")) == (2,)
    for part in ("org/other", "my_note", "model.layers.1.block_sparse_moe.experts.2.w1", "new_embeddings.safetensors"):
        assert part in text


OF_A_LAYER = [
    "1.mlp.gate.lora_A.weight", "1.block_sparse_moe.gate.lora_B.weight", "1.mlp.router.lora_A.weight",
    "0.self_attn.qkv_proj.lora_A.weight", "0.self_attn.q_norm.lora_A.weight", "0.mlp.experts.2.w4.lora_A.weight",
    "0.mlp.shared_expert.up_proj.lora_A.weight", "0.mlp.experts.2.gate_up_proj.lora_A.weight",
    "0.mlp.experts.base_layer.base_layer.lora_A.weight", "00.self_attn.q_proj.lora_A.weight",
    "٣.self_attn.q_proj.lora_A.weight", "-1.self_attn.q_proj.lora_A.weight",
]  # fmt: skip
OF_Q = [
    "lora_magnitude_vector", "lora_magnitude_vector.default.weight", "lora_B.bias", "base_layer.bias", "lora_C.weight",
    "modules_to_save.default.weight", "lora_A.other.weight", "lora_A.weight\n", "lora_diag.weight",
]  # fmt: skip
ELSEWHERE = [
    "base_model.model.lm_head.lora_A.weight", "base_model.model.lm_head.weight", "nonsense", "",
    "base_model.model.model.embed_tokens.lora_embedding_A", "base_model.model.model.embed_tokens.weight",
    "base_model.model.layers.0.self_attn.q_proj.lora_A.weight", "model.layers.0.self_attn.q_proj.lora_A.weight",
    "transformer.blocks.0.ffn.experts.mlp.lora_A.weight",
]  # fmt: skip
UNMATCHED = [*(f"{LAYERS}.{one}" for one in OF_A_LAYER), *(f"{Q}.{one}" for one in OF_Q), *ELSEWHERE]


@pytest.mark.parametrize("key", UNMATCHED)
def test_a_key_that_no_site_takes(key, tmp_path):
    tiny.write_adapter(tmp_path, good() | {key: torch.ones(4, 64)}, CONFIG)
    refused(tmp_path, key.strip(), "no site takes")


def pair(name: str, a: tuple[int, ...], b: tuple[int, ...]) -> dict[str, torch.Tensor]:
    return {f"{name}.lora_A.weight": torch.ones(a), f"{name}.lora_B.weight": torch.ones(b)}


TENSORS = [
    ({f"{Q}.lora_A.weight": torch.ones(4, 63)}, [f"{Q}.lora_A.weight", "[4, 63]", "[4, 64]"]),
    ({f"{Q}.lora_B.weight": torch.ones(65, 4)}, [f"{Q}.lora_B.weight", "[65, 4]", "[64, 4]"]),
    ({f"{Q}.lora_B.weight": torch.ones(4, 64)}, [f"{Q}.lora_B.weight", "[4, 64]", "[64, 4]"]),
    ({f"{Q}.lora_A.weight": torch.ones(4, 64, 1)}, ["[4, 64, 1]"]),
    ({f"{Q}.lora_A.weight": torch.ones(())}, ["shape []"]),
    ({f"{Q}.lora_A.weight": torch.ones(0, 64)}, ["shape [0, 64]", "[4, 64]"]),
    ({f"{W1}.lora_A.weight": torch.ones(3, 64), f"{W1}.lora_B.weight": torch.ones(96, 3)}, [W1, "[3, 64]"]),
    ({f"{Q}.lora_A.weight": torch.ones(4, 64, dtype=torch.float64)}, [Q, "'F64'", "F32, F16, BF16"]),
    ({f"{Q}.lora_A.weight": torch.ones(4, 64, dtype=torch.int8)}, [Q, "'I8'"]),
    ({f"{Q}.lora_A.weight": torch.full((4, 64), float("nan"))}, [f"{Q}.lora_A.weight", "NaN"]),
    ({f"{Q}.lora_B.weight": torch.full((64, 4), float("-inf")).half()}, [f"{Q}.lora_B.weight", "Inf"]),
    ({f"{W1}.lora_B.weight": torch.full((96, 4), float("nan")).bfloat16()}, [W1, "NaN"]),
    (pair(f"{LAYERS}.4.self_attn.q_proj", (4, 64), (64, 4)), ["layers.4.", "layer 4", "below 4"]),
    (pair(f"{LAYERS}.0.mlp.experts.8.w1", (4, 64), (96, 4)), ["experts.8.", "expert 8", "below 8"]),
    (pair(f"{LAYERS}.0.mlp.up_proj", (4, 64), (96, 4)), ["mlp.up_proj", "dense MLP", "8"]),
    (pair(f"{Q}", (4, 64), (64, 4)) | {f"{Q}.lora_A.default.weight": torch.ones(4, 64)}, [Q, "second"]),
    (pair(f"{LAYERS}.1.mlp.experts.2.w1", (4, 64), (96, 4)), ["experts.2.w1", "second delta"]),
    (pair(f"{LAYERS}.1.mlp.experts.2.gate_proj", (4, 64), (96, 4)), ["second delta"]),
    (pair(f"{LAYERS}.1.mlp.experts.w1", (1, 4, 64), (8, 96, 4)), ["second delta"]),
    (pair(f"{LAYERS}.0.mlp.experts.w1", (2, 4, 64), (8, 96, 4)), ["[2, 4, 64]", "[8, 4, 64] or [1, 4, 64]"]),
    (pair(f"{LAYERS}.0.mlp.experts.w2", (8, 4, 64), (1, 64, 4)), ["experts.w2", "[8, 4, 64]", "[8, 4, 96]"]),
]  # fmt: skip


@pytest.mark.parametrize(("change", "parts"), TENSORS, ids=lambda value: str(value)[:50])
def test_tensors_that_do_not_fit_the_base_model(change, parts, tmp_path):
    tiny.write_adapter(tmp_path, good() | change, CONFIG)
    refused(tmp_path, *parts)


def test_tensors_of_another_architecture(tmp_path):
    tiny.write_adapter(tmp_path, good(), CONFIG)
    refused(tmp_path, W1, "another architecture", "qwen3_moe", spec=spec_of("qwen3_moe", num_experts=8))
    refused(tmp_path, W1, "experts in layer 1", "without experts", spec=spec_of("llama"))


@pytest.mark.parametrize("key", sorted(good()))
def test_half_a_pair(key, tmp_path):
    other = key.replace("lora_A", "lora_B") if "lora_A" in key else key.replace("lora_B", "lora_A")
    tiny.write_adapter(tmp_path, {name: tensor for name, tensor in good().items() if name != other}, CONFIG)
    refused(tmp_path, key, "half a pair", "both")


@pytest.mark.parametrize(("parameters", "names", "parts"), [
    ([], ["experts"], ["target_parameters", "without an expert parameter"]),
    (["mlp.experts.gate_up_proj"], ["experts", "experts.base_layer"], ["gate_up_proj for layer 0"]),
    (["experts.down_proj"], ["experts.base_layer"], ["down_proj for layer 0"]),
    (["gate_up_proj", "gate_up_proj_bias"], ["experts"], ["target_parameters", "gate_up_proj_bias"]),
    (["gate_up_proj"], ["experts"], [f"{FUSED}.lora_A.weight", "[32, 96]", "[32, 64]"]),
    (["model.layers.1.mlp.experts.down_proj"], ["experts"], ["for layer 0"]),
])  # fmt: skip
def test_fused_tensors_that_target_parameters_does_not_explain(parameters, names, parts, tmp_path):
    tensors = {}
    for name in names:
        a, b = ((32, 64), (192, 32)) if "base_layer" in name else ((32, 96), (64, 32))
        tensors |= pair(f"{LAYERS}.0.mlp.{name}", a, b)
    tiny.write_adapter(tmp_path, tensors, CONFIG | {"target_parameters": parameters})
    refused(tmp_path, *parts)


def test_both_fused_tensors_explain_themselves(tmp_path):
    tensors = pair(f"{FUSED}.base_layer", (32, 64), (192, 32)) | pair(FUSED, (32, 96), (64, 32))
    tiny.write_adapter(tmp_path, tensors, CONFIG)
    with open_adapter(tmp_path, spec_of()) as adapter:
        assert [site.projection for site in adapter.sites()] == ["gate_up", "down"]
