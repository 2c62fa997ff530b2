"""Base weights with a hot adapter in them: its rows need no server, all others are PEFT's, token by token."""

import contextlib
import functools
import json
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from client_connector.transformers import attach
from lora_server.demo import tiny
from lora_server.demo.engine import Sequence, generate, load_model
from lora_server.demo.inproc import InprocServer
from lora_server.errors import ConfigError, GeometryMismatchError, UnknownAdapterError
from lora_server.merged import MERGED
from lora_server.spec import load as load_spec
from tests.support import alora
from tests.support.workload import NEW_TOKENS, merge, workload

HOT = "fused"


@contextlib.contextmanager
def entries_of(lora):
    """The entries of every message that is sent inside."""
    sent = []
    lora.observe(lambda times: sent.append(times.entries))
    yield sent
    lora.observe(None)


@pytest.fixture(scope="module", params=tiny.KINDS)
def load(request):
    return workload(request.param)


@pytest.fixture(scope="module")
def merged(load, tmp_path_factory):
    out = tmp_path_factory.mktemp("merged") / load.kind
    merge(load.base, load.paths[HOT], HOT, out)
    return load_model(out)


@pytest.fixture(scope="module")
def server(load):
    with contextlib.closing(InprocServer(load.spec, load.paths, layout="ep2-pp2", max_step_rows=24)) as server:
        yield server


def test_tokens_of_hot_cold_and_base_rows_equal_peft(load, merged, server):
    with attach(merged, server) as lora, lora.adapters(load.names):
        load.check(generate(merged, load.batch, NEW_TOKENS))


def test_outside_a_block_the_model_is_the_plain_base_model(load, merged, server):
    base = [Sequence(one.prompt, None) for one in load.batch[:2]]
    expected = [load.answer(None, one.prompt) for one in base]
    with attach(merged, server):
        assert [one.tokens for one in generate(merged, base, NEW_TOKENS)] == [one.tokens for one in expected]


def test_hot_rows_send_nothing_and_a_share_of_0_8_sends_0_4_of_the_entries(load, merged, server):
    hot, cold = [[Sequence(load.batch[0].prompt, name)] for name in (HOT, "all-cold")]
    server.held["all-cold"] = replace(server.held[HOT], name="all-cold", version="another")
    try:
        with attach(merged, server) as lora:
            with entries_of(lora) as sent, lora.adapters([HOT]):
                generate(merged, hot, NEW_TOKENS)
            assert sent == []
            with entries_of(lora) as sent, lora.adapters([HOT] * 8 + ["all-cold"] * 2):
                generate(merged, hot * 8 + cold * 2, NEW_TOKENS)
        with (
            attach(load.model, server) as lora,
            entries_of(lora) as unmerged,
            lora.adapters([HOT] * 8 + ["all-cold"] * 2),
        ):
            generate(load.model, hot * 8 + cold * 2, NEW_TOKENS)
    finally:
        del server.held["all-cold"]
    assert sum(sent) == 0.4 * sum(unmerged)


def test_rows_before_an_invocation_are_the_base_models(tmp_path):
    load = workload("llama")
    paths = alora.make(load.model, tmp_path / "adapters")
    case = alora.case(load.model, paths)
    merge(load.base, paths["plain"], "plain", tmp_path / "out")
    model = load_model(tmp_path / "out")
    with contextlib.closing(InprocServer(load.spec, paths)) as server, attach(model, server) as lora:
        with lora.adapters([sequence.adapter for sequence in case.batch]):
            case.check(generate(model, case.batch, NEW_TOKENS))


def bfloat16_model(kind, directory, **more):
    """A model, saved in `directory`, two adapters of all its projections, and the record of a merge of the hot one."""
    model = tiny.make_model(kind, dtype=torch.bfloat16)
    tiny.save_model(model, directory / "base")
    paths = {name: directory / name for name in (HOT, "cold")}
    for seed, path in enumerate(paths.values()):
        tiny.make_adapter(model, path, seed=seed, lora_rank=4, targets="all", **more)
    return model, paths, merge(directory / "base", paths[HOT], HOT, directory / "out")


def errors_of(directory, paths, ids, exact, error):
    """The errors of engines without and with a merge, by the name of the adapter of all their rows: `error(engine,
    expected)` runs the engine on `ids`."""

    def of(weights):
        engine, found = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.bfloat16).eval(), {}
        server = InprocServer(load_spec(directory / "base"), paths)
        with contextlib.closing(server), attach(engine, server) as lora:
            for name, expected in exact.items():
                with lora.adapters([name] * len(ids)):
                    found[name] = error(engine, expected)
        return found

    return of(directory / "base"), of(directory / "out")


@pytest.mark.long
@pytest.mark.parametrize("kind", tiny.KINDS)
@torch.no_grad()
def test_bfloat16_logits_of_other_rows_are_within_the_bars(kind, tmp_path):
    """Against float32 PEFT on the same weights, beside an engine without a merge: base model 2 times, others 1.4."""
    model, paths, _ = bfloat16_model(kind, tmp_path)
    ids = torch.randint(3, 250, (16, 64), generator=torch.Generator().manual_seed(3))
    exact = {None: model.float()(ids).logits, "cold": tiny.peft_model(model, paths["cold"])(ids).logits}

    def error(engine, expected):
        wrong = (engine(ids).logits.float() - expected).norm(dim=-1) / expected.norm(dim=-1)
        return float(wrong.square().mean().sqrt())

    unmerged, merged = errors_of(tmp_path, paths, ids, exact, error)
    assert merged[None] <= 2.0 * unmerged[None] and merged["cold"] <= 1.4 * unmerged["cold"], (unmerged, merged)


def relative_error(engine, exact, ids):
    """The root mean square error of the outputs of attention's and the MLP's linear layers and of blocks of experts,
    against `exact`, a float64 model that computes each of them from the engine's own inputs."""
    sums, hooks = torch.zeros(2, dtype=torch.float64), []

    def compare(module, args, output, *, expected):
        wanted = expected(*(one.double() if one.is_floating_point() else one for one in args))
        sums.add_(torch.stack([(output.double() - wanted).square().sum(), wanted.square().sum()]))

    for name, module in engine.named_modules():
        if name.endswith(("_proj", ".experts")):
            expected = exact.get_submodule(name)
            hooks.append(module.register_forward_hook(functools.partial(compare, expected=expected)))
    engine(ids)
    for hook in hooks:
        hook.remove()
    return float((sums[0] / sums[1]).sqrt())


@pytest.mark.parametrize("kind", tiny.KINDS)
@torch.no_grad()
def test_bfloat16_outputs_of_each_site_are_within_the_bars_of_float64(kind, tmp_path):
    """Deltas are a tenth of the weights: LoRA's paper has 0.06 to 0.11 (arXiv 2106.09685, table 7)."""
    model, paths, record = bfloat16_model(kind, tmp_path, alpha=1.6)
    assert 0.05 < record.delta_ratio < 0.15
    exact = {None: model.double()}
    model.set_experts_implementation("eager")  # the other ones have no float64
    exact["cold"] = tiny.apply_literal(exact[None], paths["cold"])
    ids = torch.randint(3, 250, (4, 32), generator=torch.Generator().manual_seed(3))
    unmerged, merged = errors_of(tmp_path, paths, ids, exact, functools.partial(relative_error, ids=ids))
    ratios = {name: merged[name] / unmerged[name] for name in exact}
    assert 1.2 < ratios[None] <= 2.0 and 1.05 < ratios["cold"] <= 1.4, (unmerged, merged)


def test_weights_of_another_version_base_or_name_are_refused(tmp_path):
    load = workload("llama")
    out = tmp_path / "out"
    merge(load.base, load.paths[HOT], HOT, out)
    model, record = load_model(out), json.loads((out / MERGED).read_text())

    def refused(error, match, **changes):
        (out / MERGED).write_text(json.dumps(record | changes))
        server = InprocServer(load.spec, load.paths, base_weights=record["base_weights"])
        with contextlib.closing(server), pytest.raises(error, match=match):
            attach(model, server)

    refused(UnknownAdapterError, "the weights contain fused 000000000000: adapter", version="0" * 64)
    refused(GeometryMismatchError, "was merged into other", base_fingerprint="0" * 16, base_model="other")
    refused(GeometryMismatchError, "has the same sizes and weights", base_weights="0" * 16)
    refused(UnknownAdapterError, "'law", name="law")
    refused(ConfigError, "expected 3 bytes", files={"model.safetensors": 3})
