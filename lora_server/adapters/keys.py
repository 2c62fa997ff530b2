"""Map tensor names of an adapter to the matrix of a site, section and expert that they hold.

Every name form that is served is listed in `_FORMS`; any other name is refused. One tensor holds

    MATRIX   one expert's (or a dense site's) 2-D A or B
    FLAT     PEFT's fused target_parameters: A [E*r, in] row e*r+j, B [out, r*E] column j*E+e
    STACKED  3-D, A [E, r, in], B [E, out, r]; a first dimension of 1 is shared by all experts
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from enum import Enum, auto
from typing import NamedTuple

from lora_server.adapters.config import CONFIG
from lora_server.adapters.refusal import refusal
from lora_server.adapters.settings import LoraSettings
from lora_server.spec import ModelSpec, Site


class Form(Enum):
    """Layout of matrices in one tensor; see the module's docstring."""

    MATRIX = auto()
    FLAT = auto()
    STACKED = auto()


class Target(NamedTuple):
    """Target of a pair of tensors. `module` is the name that rank_pattern sees."""

    site: Site
    section: str
    expert: int | None  # None: all experts
    form: Form
    module: str


_NUMBER = "0|[1-9][0-9]{0,6}"
_EXPERTS = r"(?P<block>mlp|block_sparse_moe)\.experts"
_EXPERT_NAMES = r"(?P<name>w[123]|(?:gate|up|down)_proj)"
_FORMS = (
    (Form.MATRIX, re.compile(r"self_attn\.(?P<name>[qkvo]_proj)")),
    (Form.MATRIX, re.compile(r"mlp\.(?P<name>(?:gate|up|down)_proj)")),
    (Form.MATRIX, re.compile(rf"{_EXPERTS}\.(?P<expert>{_NUMBER})\.{_EXPERT_NAMES}")),
    (Form.STACKED, re.compile(rf"{_EXPERTS}\.(?P<name>w[123]|(?:gate|up|down|gate_up)_proj)")),
    (Form.FLAT, re.compile(rf"{_EXPERTS}(?P<name>\.base_layer|)")),
)
_KEY = re.compile(
    rf"base_model\.model\.(?P<module>model\.layers\.(?P<layer>{_NUMBER})\.(?P<rest>.+?))"
    r"\.lora_(?P<side>[AB])(?:\.default)?(?:\.weight)?"
)
_WEIGHT = re.compile(rf"(?P<module>model\.layers\.(?P<layer>{_NUMBER})\.(?P<rest>.+?))(?:\.weight)?")
_NESTED = re.compile(rf"\.layers\.({_NUMBER})\..*\.experts\.base_layer\.lora_")
_SECTIONS = {"w1": "gate", "w3": "up", "w2": "down"}
_DENSE_PROJECTION = {"q": "qkv", "k": "qkv", "v": "qkv", "o": "o", "gate": "gate_up", "up": "gate_up"}
_SERVED = (
    "lora_A and lora_B of self_attn.{q,k,v,o}_proj, mlp.{gate,up,down}_proj or mlp.experts, "
    "below base_model.model.model.layers.N"
)


def parse_key(key: str, nested: Collection[int], spec: ModelSpec, settings: LoraSettings) -> tuple[Target, str]:
    """Return the target of a tensor, and its side, "A" or "B". `nested`: see `nested_layers`.

    Raises AdapterFormatError for a name that no site of this base model has.
    """
    matched = _KEY.fullmatch(key)
    for form, pattern in _FORMS:
        found = pattern.fullmatch(matched["rest"]) if matched else None
        if matched is None or found is None:
            continue
        layer, groups = int(matched["layer"]), found.groupdict()
        if layer >= spec.layers:
            raise refusal(key, got=f"layer {layer}", expected=f"a layer below {spec.layers}", do=_other_base(spec))
        expert = int(groups["expert"]) if groups.get("expert") else None
        _check_layer(key, layer, expert, groups, spec)
        name, module = groups["name"], matched["module"]
        if form is Form.FLAT:
            name = _fused_parameter(key, layer, nested, settings)
            module = f"{module.removesuffix('.base_layer')}.{name}"
        return _target(name, layer, expert if "block" in groups else 0, form, module), matched["side"]
    raise refusal(key, got="a tensor that no site takes", expected=_SERVED, do=_advice(key))


def weight_target(name: str, spec: ModelSpec) -> Target | None:
    """Return what a tensor of a base model's checkpoint holds; None for one that no adapter changes."""
    matched = _WEIGHT.fullmatch(name)
    for form, pattern in _FORMS if matched else ():
        assert matched is not None
        found = pattern.fullmatch(matched["rest"])
        if found is None or form is Form.FLAT or int(matched["layer"]) >= spec.layers:
            continue
        expert = None if form is Form.STACKED else int(found.groupdict().get("expert") or 0)
        return _target(found["name"], int(matched["layer"]), expert, form, matched["module"])
    return None


def _target(name: str, layer: int, expert: int | None, form: Form, module: str) -> Target:
    section = _SECTIONS.get(name, name.removesuffix("_proj"))
    return Target(Site(layer, _DENSE_PROJECTION.get(section, section)), section, expert, form, module)


def _check_layer(key: str, layer: int, expert: int | None, groups: dict[str, str], spec: ModelSpec) -> None:
    if "block" not in groups:
        if groups["name"] in ("gate_proj", "up_proj", "down_proj") and layer in spec.moe_layers:
            got = f"a dense MLP in layer {layer}"
            raise refusal(key, got=got, expected=f"experts, as the layer has {spec.experts}", do=_other_base(spec))
        return
    if layer not in spec.moe_layers:
        raise refusal(key, got=f"experts in layer {layer}", expected="a layer without experts", do=_other_base(spec))
    if expert is not None and expert >= spec.experts:
        wanted = f"an expert below {spec.experts}"
        raise refusal(key, got=f"expert {expert}", expected=wanted, do=_other_base(spec))
    if not _is_name_of(spec.model_type, groups["block"], groups["name"], expert):
        wanted = f"the expert names of {spec.model_type}"
        raise refusal(key, got="the expert names of another architecture", expected=wanted, do=_other_base(spec))


def _is_name_of(model_type: str, block: str, name: str, expert: int | None) -> bool:
    """Return whether a model of this type has experts of this name. Fused and stacked ones may be of any type."""
    if model_type == "mixtral":
        return True
    if block == "block_sparse_moe":
        return False
    return expert is None or (model_type == "qwen3_moe" and name.endswith("_proj"))


def nested_layers(keys: Iterable[str]) -> frozenset[int]:
    """Return the layers in which PEFT adapted two parameters of the experts, one wrapper inside the other."""
    return frozenset(int(found[1]) for found in map(_NESTED.search, keys) if found)


def _fused_parameter(key: str, layer: int, nested: Collection[int], settings: LoraSettings) -> str:
    """Return the parameter that a fused tensor adapts. PEFT nests in the model's order: gate_up inside down."""
    names = ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")
    targeted = [name for name in names if settings.targets_parameter(f"model.layers.{layer}.mlp.experts.{name}")]
    if any(name.endswith("_bias") for name in targeted):
        wanted = "gate_up_proj and down_proj only"
        raise refusal(f"{CONFIG}: target_parameters", got=" and ".join(targeted), expected=wanted, do="retrain")
    inner = ".experts.base_layer." in key
    both = layer in nested
    if inner and len(targeted) != 1:
        return "gate_up_proj"
    if not inner and len(targeted) == 1 and not both:
        return targeted[0]
    if not inner and (len(targeted) == 2 or (both and not targeted)):
        return "down_proj"
    got = f"target_parameters {' and '.join(targeted) or 'without an expert parameter'} for layer {layer}"
    wanted = "gate_up_proj and down_proj, or the one that this tensor adapts"
    raise refusal(key, got=got, expected=wanted, do=f"correct target_parameters in {CONFIG}")


def _other_base(spec: ModelSpec) -> str:
    return f"the adapter was made for another base model than {spec.name} ({spec.model_type})"


def _advice(key: str) -> str:
    for part, advice in (
        ("lora_magnitude", "DoRA cannot be served: retrain without DoRA"),
        ("lora_embedding", "embeddings cannot be served: retrain without them"),
        ("bias", "biases cannot be served: retrain with bias='none'"),
        ("modules_to_save", "whole modules cannot be served: retrain without modules_to_save"),
        ("gate.", "routers cannot be served: retrain without them"),
        ("router", "routers cannot be served: retrain without them"),
    ):
        if part in key:
            return advice
    return "retrain without it, or check that the adapter belongs to this base model"
