"""Model geometry: what the base model looks like to an adapter. Leaf module: stdlib only.

A *site* is a (layer, projection) where a LoRA applies. Expert sites have one weight per expert, a
dense site has one. Widths are those of the whole, unsharded model:

    gate_up  hidden -> 2 * ffn        rows [gate | up]
    down     ffn    -> hidden
    qkv      hidden -> q + k + v      rows [q | k | v]
    o        q      -> hidden
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from lora_server.errors import ConfigError

PROJECTIONS = ("gate_up", "down", "qkv", "o")
EXPERT_PROJECTIONS = ("gate_up", "down")


class Site(NamedTuple):
    """A place where a LoRA applies: a layer and one of PROJECTIONS."""

    layer: int
    projection: str


class Invocation(NamedTuple):
    """The token sequence that activates an aLoRA: the adapter acts from its last occurrence in the prompt on.

    `text` is the legacy form, which the engine's tokenizer turns into tokens; used if there are no `tokens`.
    """

    tokens: tuple[int, ...] = ()
    text: str = ""


class Section(NamedTuple):
    """A named run of a site's output rows, e.g. gate = [0, ffn) of gate_up."""

    name: str
    begin: int
    end: int


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Geometry of one base model.

    `ffn` is one expert's intermediate size, `dense_ffn` that of a layer without experts;
    `moe_layers` lists the layers that have experts (empty for a dense model). `interleaved_gate_up`
    says that the engine stores gate and up rows alternating (GPT-OSS); on our wire they never are.
    `assumed` names fields that no published config gives.
    """

    name: str
    model_type: str
    layers: int
    hidden: int
    ffn: int
    experts: int
    top_k: int
    heads: int
    kv_heads: int
    head_dim: int
    dense_ffn: int
    moe_layers: tuple[int, ...]
    interleaved_gate_up: bool = False
    assumed: tuple[str, ...] = ()

    @property
    def geometry(self) -> str:
        """Sizes that decide bytes and times, as one word; names and directories of a model differ, this does not."""
        experts = f"-{self.experts}x{self.ffn}-top{self.top_k}" if self.moe_layers else f"-{self.dense_ffn}"
        return f"{self.layers}x{self.hidden}{experts}-heads{self.heads}x{self.head_dim}-kv{self.kv_heads}"

    @property
    def q_width(self) -> int:
        """Rows of q, and columns of o."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Rows of k, and of v."""
        return self.kv_heads * self.head_dim

    def experts_at(self, site: Site) -> int:
        """Number of experts of a site; 1 for a dense site."""
        if site.projection in EXPERT_PROJECTIONS and site.layer in self.moe_layers:
            return self.experts
        return 1

    def is_dense(self, site: Site) -> bool:
        """Return whether the site has one weight for every row (attention, or an MLP without experts)."""
        return site.projection not in EXPERT_PROJECTIONS or site.layer not in self.moe_layers

    def ffn_at(self, layer: int) -> int:
        """Intermediate size of one expert, or of the dense MLP, of a layer."""
        return self.ffn if layer in self.moe_layers else self.dense_ffn

    def in_width(self, site: Site) -> int:
        """Columns of A."""
        if site.projection == "down":
            return self.ffn_at(site.layer)
        return self.q_width if site.projection == "o" else self.hidden

    def sections(self, site: Site) -> tuple[Section, ...]:
        """Return the named runs of a site's output rows, in order."""
        if site.projection == "gate_up":
            ffn = self.ffn_at(site.layer)
            return Section("gate", 0, ffn), Section("up", ffn, 2 * ffn)
        if site.projection == "qkv":
            q, kv = self.q_width, self.kv_width
            return Section("q", 0, q), Section("k", q, q + kv), Section("v", q + kv, q + 2 * kv)
        return (Section(site.projection, 0, self.hidden),)

    def out_width(self, site: Site) -> int:
        """Rows of B."""
        return self.sections(site)[-1].end

    def sites(self, projections: Sequence[str] = PROJECTIONS) -> Iterator[Site]:
        """Yield all sites of the given projections, by layer."""
        for layer in range(self.layers):
            for projection in projections:
                yield Site(layer, projection)

    def adapter_bytes(
        self,
        lora_rank: float,
        *,
        projections: Sequence[str] = EXPERT_PROJECTIONS,
        element_bytes: int = 2,
        shared_a: bool = False,
    ) -> int:
        """Bytes of an adapter on all experts of `projections`.

        `shared_a`: the sections of a site (gate and up; q, k and v) share one A, as in PEFT's fused
        `target_parameters` layout; otherwise each section has its own. A mean rank may be fractional.
        """
        if lora_rank <= 0:
            raise ConfigError(f"lora_rank must be positive, got {lora_rank}")
        elements = 0.0
        for site in self.sites(projections):
            num_a = 1 if shared_a else len(self.sections(site))
            pair = num_a * self.in_width(site) + self.out_width(site)
            elements += self.experts_at(site) * lora_rank * pair
        return int(elements * element_bytes)

    def fingerprint(self) -> str:
        """Digest of the geometry alone: equal for two models that an adapter cannot tell apart."""
        geometry = asdict(replace(self, name="", assumed=()))
        return hashlib.sha256(json.dumps(geometry, sort_keys=True).encode()).hexdigest()[:16]

    def to_json(self) -> str:
        """Return one line of JSON that `from_json` reads back."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> ModelSpec:
        """Inverse of `to_json`."""
        fields = json.loads(text)
        fields["moe_layers"] = tuple(fields["moe_layers"])
        fields["assumed"] = tuple(fields["assumed"])
        return cls(**fields)


_DENSE_TYPES = ("llama", "mistral", "qwen2", "qwen3")
_MOE_TYPES = ("mixtral", "qwen3_moe", "gpt_oss", "dbrx")


def from_config(config: dict[str, Any], name: str = "") -> ModelSpec:
    """Return the geometry that a Hugging Face `config.json` describes.

    Raises ConfigError for an unknown `model_type` or a missing or non-positive field.
    """
    model_type = config.get("model_type")
    if model_type not in _DENSE_TYPES + _MOE_TYPES:
        raise ConfigError(f"model_type: got {model_type!r}, expected one of {', '.join(_DENSE_TYPES + _MOE_TYPES)}")
    if model_type == "dbrx":
        return _from_dbrx(config, name)
    layers = _positive(config, "num_hidden_layers")
    hidden = _positive(config, "hidden_size")
    heads = _positive(config, "num_attention_heads")
    moe = model_type in _MOE_TYPES
    dense_ffn = _positive(config, "intermediate_size")
    spec = ModelSpec(
        name=name or str(config.get("_name_or_path") or model_type),
        model_type=model_type,
        layers=layers,
        hidden=hidden,
        ffn=_positive(config, "moe_intermediate_size") if model_type == "qwen3_moe" else dense_ffn,
        experts=_positive(config, "num_local_experts", "num_experts") if moe else 1,
        top_k=_positive(config, "num_experts_per_tok", "experts_per_token") if moe else 1,
        heads=heads,
        kv_heads=_positive(config, "num_key_value_heads") if config.get("num_key_value_heads") else heads,
        head_dim=_positive(config, "head_dim") if config.get("head_dim") else _split(hidden, heads),
        dense_ffn=dense_ffn,
        moe_layers=_moe_layers(config, layers) if moe else (),
        interleaved_gate_up=model_type == "gpt_oss",
    )
    if spec.top_k > spec.experts:
        raise ConfigError(f"num_experts_per_tok: got {spec.top_k}, expected at most {spec.experts} experts")
    return spec


def _from_dbrx(config: dict[str, Any], name: str) -> ModelSpec:
    ffn, attn = config.get("ffn_config") or {}, config.get("attn_config") or {}
    layers, hidden, heads = (_positive(config, key) for key in ("n_layers", "d_model", "n_heads"))
    ffn_width = _positive(ffn, "ffn_hidden_size")
    return ModelSpec(
        name=name or "dbrx",
        model_type="dbrx",
        layers=layers,
        hidden=hidden,
        ffn=ffn_width,
        experts=_positive(ffn, "moe_num_experts"),
        top_k=_positive(ffn, "moe_top_k"),
        heads=heads,
        kv_heads=_positive(attn, "kv_n_heads"),
        head_dim=_split(hidden, heads),
        dense_ffn=ffn_width,
        moe_layers=tuple(range(layers)),
    )


def _positive(config: dict[str, Any], *keys: str) -> int:
    for key in keys:
        value = config.get(key)
        if value is not None:
            if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
                raise ConfigError(f"{key}: got {value!r}, expected a positive integer")
            return value
    raise ConfigError(f"config.json has no {' or '.join(keys)}; it is needed to know the model's geometry")


def _split(hidden: int, heads: int) -> int:
    if hidden % heads:
        raise ConfigError(f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}; give head_dim")
    return hidden // heads


def _moe_layers(config: dict[str, Any], layers: int) -> tuple[int, ...]:
    dense = set(config.get("mlp_only_layers") or ())
    every = config.get("decoder_sparse_step") or 1
    return tuple(layer for layer in range(layers) if layer not in dense and (layer + 1) % every == 0)


def load(path: str | Path) -> ModelSpec:
    """Return the geometry of the model in a directory (its config.json), or of a preset by name."""
    if str(path) in PRESETS:
        return PRESETS[str(path)]
    directory = Path(path)
    file = directory / "config.json" if directory.is_dir() else directory
    try:
        config = json.loads(file.read_text())
    except FileNotFoundError:
        raise ConfigError(
            f"base model: no config.json at {file}; give a model directory or one of {', '.join(PRESETS)}"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"base model: {file} cannot be read as JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"base model: {file} holds a {type(config).__name__}, expected a JSON object")
    return from_config(config, name=directory.resolve().name if directory.is_dir() else "")


def _preset(
    name: str,
    model_type: str,
    geometry: tuple[int, int, int, int, int],
    attention: tuple[int, int, int],
    assumed: tuple[str, ...] = (),
) -> ModelSpec:
    layers, experts, top_k, hidden, ffn = geometry
    heads, kv_heads, head_dim = attention
    return ModelSpec(
        name=name,
        model_type=model_type,
        layers=layers,
        hidden=hidden,
        ffn=ffn,
        experts=experts,
        top_k=top_k,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        dense_ffn=ffn,
        moe_layers=tuple(range(layers)),
        interleaved_gate_up=model_type == "gpt_oss",
        assumed=assumed,
    )


# Table 3 of the paper; geometry (layers, experts, top-k, hidden, ffn), attention (heads, kv, dim).
PRESETS: dict[str, ModelSpec] = {
    spec.name: spec
    for spec in (
        _preset("gpt-oss-20b", "gpt_oss", (24, 32, 4, 2880, 2880), (64, 8, 64)),
        # The paper's table says 32 layers; the published config says 24. For comparisons only.
        _preset("gpt-oss-20b-paper", "gpt_oss", (32, 32, 4, 2880, 2880), (64, 8, 64)),
        _preset("qwen3-30b-a3b", "qwen3_moe", (48, 128, 8, 2048, 768), (32, 4, 128)),
        _preset("mixtral-8x7b", "mixtral", (32, 8, 2, 4096, 14336), (32, 8, 128)),
        # Widths from MegaScale-Infer (the paper takes its scaled model); attention is our guess.
        _preset(
            "scaled-moe",
            "mixtral",
            (18, 32, 4, 8192, 8192),
            (64, 8, 128),
            ("hidden", "ffn", "heads", "kv_heads", "head_dim"),
        ),
        _preset("dbrx", "dbrx", (40, 16, 4, 6144, 10752), (48, 8, 128)),
        _preset("small-mixtral", "mixtral", (4, 8, 2, 256, 512), (4, 2, 64)),  # no paper's: `lora-server profile`'s
    )
}
