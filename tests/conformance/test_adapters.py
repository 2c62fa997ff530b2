"""Canonical tensors against PEFT's own delta weights, in float64, for every layout on disk."""

import json
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch

from lora_server import spec as specs
from lora_server.adapters import open_adapter, validate_adapter
from lora_server.demo import tiny
from lora_server.spec import Site
from tests.support.adapter_files import read_all
from tests.support.workload import model_of, spec_of

MIXTRAL = "model.layers.1.block_sparse_moe.experts"
QWEN = "model.layers.1.mlp.experts"
CASES = [
    *((kind, {"targets": targets}) for kind in tiny.KINDS for targets in ("experts", "attention", "qv", "all")),
    *((kind, {"targets": t}) for kind in ("mixtral", "qwen3_moe", "gpt_oss") for t in ("gate_up", "down")),
    *((kind, {"targets": "all", "rslora": True, "alpha": 7.0}) for kind in tiny.KINDS),
    *((kind, {"style": "per_expert", "targets": t}) for kind in ("mixtral", "qwen3_moe") for t in ("experts", "all")),
    ("llama", {"targets": "dense"}),
    ("qwen3_moe", {"targets": "down", "style": "per_expert", "rslora": False}),
    ("llama", {"targets": "all", "rank_pattern": {"q_proj": 2, r".*layers\.[12]\.mlp\.up_proj": 7, "layers.0": 3}}),
    ("llama", {"targets": "all", "alpha_pattern": {"^model.layers.3.self_attn.o_proj": 5, "v_proj|o_proj": 30}}),
    ("mixtral", {"targets": "all", "rank_pattern": {"down_proj": 3, "layers.2.mlp.experts.gate_up_proj": 6}}),
    ("gpt_oss", {"rank_pattern": {r"(.*\.)?1\..*gate_up_proj": 2}, "alpha_pattern": {"gate_up_proj": 3.5}}),
    ("qwen3_moe", {"rslora": True, "rank_pattern": {"down_proj": 1}, "alpha_pattern": {"experts.down_proj": 2}}),
]


def canonical(path: Path, kind: str) -> dict[tuple[Site, int], torch.Tensor]:
    """Delta [out, in] by (site, expert), from what Adapter.read returns."""
    spec, deltas = spec_of(kind), {}
    with open_adapter(path, spec) as adapter:
        for site in adapter.sites():
            for expert in adapter.experts(site):
                delta = torch.zeros(spec.out_width(site), spec.in_width(site), dtype=torch.float64)
                parts = adapter.read(site, expert)
                for dtype in (torch.float32, torch.bfloat16):  # that of the files, and another
                    nan = partial(torch.full_like, fill_value=torch.nan, dtype=dtype)
                    places = [(nan(a), nan(b)) for _, a, b in parts]
                    adapter.read_into(site, expert, places)
                    for (_, a, b), (into_a, into_b) in zip(parts, places, strict=True):
                        assert torch.equal(into_a, a.to(dtype)) and torch.equal(into_b, b.to(dtype))
                for pair, a, b in parts:
                    assert a.is_contiguous() and b.is_contiguous()
                    assert a.shape == (pair.lora_rank, spec.in_width(site))
                    assert b.shape == (pair.out_end - pair.out_begin, pair.lora_rank)
                    delta[pair.out_begin : pair.out_end] += pair.scale * (b.double() @ a.double())
                deltas[site, expert] = delta
    return deltas


def by_peft(path: Path, kind: str) -> dict[tuple[Site, int], torch.Tensor]:
    """The same from PEFT's get_delta_weight."""
    spec, deltas = spec_of(kind), {}
    for name, module in tiny.peft_model(model_of(kind), path).double().named_modules():
        if not hasattr(module, "get_delta_weight") or not module.lora_A:
            continue
        layer = int(name.split(".layers.")[1].split(".")[0])
        weight = module.get_delta_weight("default").detach()
        parameter = getattr(module, "parameter_name", name.rsplit(".", 1)[-1])
        if weight.dim() == 3:
            site = Site(layer, parameter.removesuffix("_proj"))
            weight = weight.mT if kind == "gpt_oss" else weight
            if kind == "gpt_oss" and parameter == "gate_up_proj":
                weight = torch.cat((weight[:, 0::2], weight[:, 1::2]), dim=1)
            deltas |= {(site, expert): weight[expert] for expert in range(spec.experts)}
            continue
        section = parameter.removesuffix("_proj")
        site = Site(layer, {"gate": "gate_up", "up": "gate_up", "down": "down", "o": "o"}.get(section, "qkv"))
        whole = deltas.setdefault((site, 0), torch.zeros(spec.out_width(site), spec.in_width(site)).double())
        begin, end = next((s.begin, s.end) for s in spec.sections(site) if s.name == section)
        whole[begin:end] += weight
    return deltas


@pytest.mark.parametrize(("kind", "settings"), CASES, ids=lambda value: str(value).replace(" ", ""))
def test_canonical_tensors_are_what_peft_computes(kind, settings, tmp_path):
    tiny.make_adapter(model_of(kind), tmp_path, lora_rank=4, seed=11, **settings)
    ours, theirs = canonical(tmp_path, kind), by_peft(tmp_path, kind)
    assert ours.keys() == theirs.keys()
    for place, delta in theirs.items():
        assert delta.abs().max() > 0.01
        torch.testing.assert_close(ours[place], delta, rtol=0, atol=1e-6, msg=lambda text, at=place: f"{at}: {text}")


STYLES = [
    *((kind, "fused") for kind in tiny.KINDS),
    *((kind, "per_expert") for kind in ("mixtral", "qwen3_moe")),
    *((kind, "shared_outer") for kind in ("mixtral", "qwen3_moe", "gpt_oss")),
]


@pytest.mark.parametrize(("kind", "style"), STYLES)
def test_the_literal_oracle_agrees_with_peft_and_with_us(kind, style, tmp_path):
    model = tiny.make_model(kind, dtype=torch.float64)
    model.set_experts_implementation("eager")  # the grouped one has no float64
    if style == "shared_outer":
        tiny.make_shared_outer(model, tmp_path, lora_rank=4, seed=3)
    else:
        tiny.make_adapter(model, tmp_path, lora_rank=4, seed=3, style=style, targets="all", dtype=torch.float32)
    merged = check_literal(tmp_path, model, kind, atol=1e-12)
    if style != "shared_outer":
        tokens = torch.arange(24).view(2, 12) * 7 % 256
        logits = tiny.peft_model(model, tmp_path).double()(tokens).logits
        torch.testing.assert_close(merged(tokens).logits, logits, rtol=0, atol=1e-5)


def check_literal(path: Path, model, kind: str, atol: float = 1e-5):
    """Merge the adapter literally and compare every weight's change with the canonical tensors."""
    merged = tiny.apply_literal(model, path)
    for place, delta in canonical(path, kind).items():
        assert delta.abs().max() > 0.01
        got = _weight(merged, kind, *place) - _weight(model, kind, *place)
        torch.testing.assert_close(got.double(), delta, rtol=0, atol=atol)
    return merged


def _weight(model, kind: str, site: Site, expert: int) -> torch.Tensor:
    """The model's own weight of a site, in canonical row order."""
    layer = model.model.layers[site.layer]
    if site.projection in ("qkv", "o") or kind == "llama":
        names = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")}.get(site.projection, (site.projection,))
        block = layer.self_attn if site.projection in ("qkv", "o") else layer.mlp
        return torch.cat([getattr(block, f"{name}_proj").weight for name in names])
    weight = getattr(layer.mlp.experts, f"{site.projection}_proj")[expert]
    weight = weight.T if kind == "gpt_oss" else weight
    interleaved = kind == "gpt_oss" and site.projection == "gate_up"
    return torch.cat((weight[0::2], weight[1::2])) if interleaved else weight


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_gate_and_up_of_each_expert_without_down(kind, tmp_path):
    """Not against PEFT 0.21, which puts these tensors under a name that it then does not load."""
    tiny.make_adapter(model_of(kind), tmp_path, lora_rank=4, seed=3, style="per_expert", targets="gate_up")
    assert {site.projection for site, _ in canonical(tmp_path, kind)} == {"gate_up"}
    check_literal(tmp_path, model_of(kind), kind)


def test_pairs_of_separate_gate_and_up_have_their_own_rank_and_scale(tmp_path):
    ranks = {f"{MIXTRAL}.3.w1": 2, f"{MIXTRAL}.3.w3": 5, r".*experts\.6\.w[12]": 1}
    tiny.make_adapter(
        model_of("mixtral"), tmp_path, lora_rank=4, seed=1, alpha=8, style="per_expert", rank_pattern=ranks,
        alpha_pattern={f"{MIXTRAL}.3.w3": 20},
    )  # fmt: skip
    with open_adapter(tmp_path, spec_of("mixtral")) as adapter:
        gate, up = adapter.parts(Site(1, "gate_up"), 3)
        assert (gate.lora_rank, gate.scale, gate.out_begin, gate.out_end) == (2, 4.0, 0, 96)
        assert (up.lora_rank, up.scale, up.out_begin, up.out_end) == (5, 4.0, 96, 192)
        assert [part.lora_rank for part in adapter.parts(Site(0, "gate_up"), 6)] == [1, 4]
        assert [part.lora_rank for part in adapter.parts(Site(0, "down"), 6)] == [1]
        assert adapter.lora_rank == 5
    check_literal(tmp_path, model_of("mixtral"), "mixtral")


@pytest.mark.parametrize("form", ["w", "proj", "3-D", "3-D fused"])
@pytest.mark.parametrize("suffix", [".weight", ".default.weight", ""])
def test_names_that_occur_are_understood(form, suffix, tmp_path):
    generator, tensors = torch.Generator().manual_seed(5), {}

    def add(name, a_shape, b_shape):
        for side, shape in (("A", a_shape), ("B", b_shape)):
            key = f"base_model.model.model.layers.2.{name}.lora_{side}{suffix}"
            tensors[key] = torch.randn(shape, generator=generator)
        return list(tensors.values())[-2:]

    a, b = {
        "w": lambda: add("mlp.experts.5.w3", (4, 64), (96, 4)),
        "proj": lambda: add("mlp.experts.5.up_proj", (4, 64), (96, 4)),
        "3-D": lambda: [t[i] for t, i in zip(add("mlp.experts.w3", (1, 4, 64), (8, 96, 4)), (0, 5), strict=True)],
        "3-D fused": lambda: [t[5] for t in add("mlp.experts.gate_up_proj", (8, 4, 64), (8, 192, 4))],
    }[form]()
    tiny.write_adapter(tmp_path, tensors, {"r": 4, "lora_alpha": 4})
    with open_adapter(tmp_path, spec_of("mixtral")) as adapter:
        assert adapter.sites() == (Site(2, "gate_up"),)
        ((pair, a_read, b_read),) = adapter.read(Site(2, "gate_up"), 5)
        assert (pair.out_begin, pair.out_end) == (192 - b.shape[0], 192)
        assert torch.equal(a_read, a) and torch.equal(b_read, b)


def test_stacked_gate_up_of_gpt_oss_is_de_interleaved(tmp_path):
    name = "base_model.model.model.layers.0.mlp.experts.gate_up_proj"
    b = torch.randn(8, 192, 2)
    tensors = {f"{name}.lora_A.weight": torch.randn(1, 2, 64), f"{name}.lora_B.weight": b}
    tiny.write_adapter(tmp_path, tensors, {"r": 2, "lora_alpha": 4})
    with open_adapter(tmp_path, spec_of("gpt_oss")) as adapter:
        ((_, _, b_read),) = adapter.read(Site(0, "gate_up"), 7)
    assert torch.equal(b_read, torch.cat((b[7, 0::2], b[7, 1::2])))


def test_what_is_not_mentioned_has_no_delta(tmp_path):
    key = "base_model.model.model.layers.1.block_sparse_moe.experts.2.w2.lora_"
    tensors = {f"{key}A.weight": torch.ones(3, 96), f"{key}B.weight": torch.ones(64, 3)}
    tiny.write_adapter(tmp_path, tensors, {"r": 3, "lora_alpha": 3, "target_modules": ["w1", "w2", "q_proj"]})
    with open_adapter(tmp_path, spec_of("mixtral")) as adapter:
        assert adapter.sites() == (Site(1, "down"),)
        assert adapter.experts(Site(1, "down")) == (2,)
        assert adapter.experts(Site(0, "qkv")) == ()
        assert adapter.parts(Site(1, "down"), 1) == () and adapter.read(Site(1, "down"), 1) == []
        assert adapter.warnings == ()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_tensors_keep_the_files_dtype_and_bytes_are_counted(dtype, tmp_path):
    tiny.make_adapter(model_of("gpt_oss"), tmp_path, lora_rank=4, seed=3, targets="all", dtype=dtype)
    with open_adapter(tmp_path, spec_of("gpt_oss")) as adapter:
        read = read_all(adapter)
        assert {tensor.dtype for tensor in read} == {dtype}
        assert adapter.nbytes == sum(tensor.nbytes for tensor in read)


def test_a_layer_without_experts_in_a_moe_model(tmp_path):
    model = tiny.make_model("qwen3_moe", mlp_only_layers=[1], intermediate_size=80)
    spec = specs.from_config(model.config.to_dict())
    tensors = {}
    for name, rows, width in (("gate", 80, 64), ("up", 80, 64), ("down", 64, 80)):
        key = f"base_model.model.model.layers.1.mlp.{name}_proj.lora_"
        tensors |= {f"{key}A.weight": torch.randn(2, width), f"{key}B.weight": torch.randn(rows, 2)}
    tiny.write_adapter(tmp_path, tensors, {"r": 2, "lora_alpha": 2, "target_modules": ["gate_proj"]})
    with open_adapter(tmp_path, spec) as adapter:
        assert adapter.sites() == (Site(1, "gate_up"), Site(1, "down"))
        assert adapter.experts(Site(1, "down")) == (0,)
        assert [part.out_begin for part in adapter.parts(Site(1, "gate_up"), 0)] == [0, 80]


def test_reads_from_several_threads_agree(tmp_path):
    tiny.make_adapter(model_of("gpt_oss"), tmp_path, lora_rank=4, seed=3)
    with open_adapter(tmp_path, spec_of("gpt_oss")) as adapter:
        places = [(site, expert) for site in adapter.sites() for expert in adapter.experts(site)]
        alone = [adapter.read(*place)[0][2] for place in places]
        with ThreadPoolExecutor(4) as pool:
            together = list(pool.map(lambda place: adapter.read(*place)[0][2], places * 4))
    assert all(torch.equal(one, other) for one, other in zip(alone * 4, together, strict=True))


def test_the_version_follows_the_weights_and_their_meaning(tmp_path):
    def version(name: str, seed: int, **settings) -> str:
        path = tmp_path / name
        tiny.make_adapter(model_of("llama"), path, lora_rank=2, seed=seed, **settings)
        adapter, found = validate_adapter(path, spec_of("llama"))
        adapter.close()
        return found

    first = version("a", 1)
    assert first == version("b", 1) and len(first) == 64
    others = [version("c", 2), version("d", 1, alpha=5.0), version("e", 1, rslora=True)]
    others += [version(f"f{n}", 1, invocation=[17, 18][:n]) for n in (1, 2)]
    assert len({first, *others}) == 6
    config = tmp_path / "b" / "adapter_config.json"
    fields = json.loads(config.read_text()) | {"base_model_name_or_path": "x/other", "lora_dropout": 0.5}
    config.write_text(json.dumps(fields))
    adapter, again = validate_adapter(tmp_path / "b", spec_of("llama"))
    with adapter:
        assert again == first
        assert adapter.base_model == "x/other" and "x/other" in adapter.warnings[0]
