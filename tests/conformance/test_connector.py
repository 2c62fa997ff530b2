"""The transformers connector over shards in this process: equal to PEFT, and honest about misuse."""

import contextlib
import copy
import time

import pytest
import torch
from structlog.testing import capture_logs
from transformers import GenerationConfig

from client_connector.routing import Batch, Run
from client_connector.transformers import attach
from client_connector.transformers.experts import OnDevice, OnHost
from lora_server import __version__
from lora_server.demo import tiny
from lora_server.demo.engine import generate, pad
from lora_server.demo.inproc import InprocServer
from lora_server.errors import ConfigError, GeometryMismatchError, UnknownAdapterError
from lora_server.spec import Site, from_config
from tests.support.workload import NEW_TOKENS, workload

LAYOUTS = ("ep1-pp1", "ep4-pp1", "ep2-pp2", "ep1-pp4", "ep3-pp2")


@pytest.fixture(scope="module")
def load():
    return workload("mixtral")


@pytest.fixture(scope="module")
def server(load):
    with contextlib.closing(InprocServer(load.spec, load.paths, layout="ep2-pp2")) as server:
        yield server


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", tiny.KINDS)
def test_tokens_equal_peft(kind: str, layout: str):
    load = workload(kind)
    server = InprocServer(load.spec, load.paths, layout=layout, max_step_rows=24, slots=2)
    with attach(load.model, server) as lora, lora.adapters(load.names):
        load.check(generate(load.model, load.batch, NEW_TOKENS))
    server.close()


def test_deltas_matter(load):
    plain = generate(load.model, load.batch, NEW_TOKENS)
    different = [ours.tokens != theirs.tokens for ours, theirs in zip(plain, load.expected, strict=True)]
    assert different == [name is not None for name in load.names]


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_bfloat16_within_its_rounding(kind: str):
    """Every row goes to all experts: otherwise rounding, which is each processor's own, decides between them."""
    load, all_experts = workload(kind), {} if kind == "llama" else {"num_experts_per_tok": workload(kind).spec.experts}
    exact_model = tiny.make_model(kind, **all_experts)
    model = copy.deepcopy(exact_model).to(torch.bfloat16)
    ids, mask = pad(load.batch, 0)

    def peft(base) -> torch.Tensor:
        rows = [(ids[row : row + 1], mask[row : row + 1], name) for row, name in enumerate(load.names)]
        oracles = [tiny.peft_model(base, load.paths[name]) if name else base for name in load.names]
        logits = [oracle(x, attention_mask=m).logits[0, -1] for oracle, (x, m, _) in zip(oracles, rows, strict=True)]
        return torch.stack(logits).float()

    exact, rounded = peft(exact_model), peft(model)
    spec = from_config(model.config.to_dict(), name=load.spec.name)
    server = InprocServer(spec, load.paths, layout="ep2-pp2", dtype=torch.bfloat16)
    with attach(model, server) as lora, lora.adapters(load.names):
        ours = model(ids, attention_mask=mask).logits[:, -1].float()
    server.close()
    assert (ours - exact).abs().mean() <= 1.5 * (rounded - exact).abs().mean() + 1e-3


def test_shared_outer_adapters(load, tmp_path):
    tiny.make_shared_outer(load.model, tmp_path / "outer", lora_rank=6, seed=11)
    ids = torch.tensor([load.batch[0].prompt])
    expected = tiny.apply_literal(load.model, tmp_path / "outer")(ids).logits.log_softmax(-1)
    server = InprocServer(load.spec, {"outer": tmp_path / "outer"}, layout="ep3-pp2")
    with attach(load.model, server) as lora, lora.adapters(["outer"]):
        ours = load.model(ids).logits.log_softmax(-1)
    server.close()
    assert (ours - expected).abs().max() < 1e-4


def test_attaching_is_logged(load, server):
    with capture_logs() as lines, attach(load.model, server):
        assert [line["event"] for line in lines] == ["attached to the LoRA server"]
        said = {"server": "this process", "layout": "ep2-pp2", "transport": "inproc", "adapters": len(load.paths)}
        assert lines[0].items() >= (said | {"connector": __version__, "model": load.spec.name}).items()


@pytest.mark.parametrize("settings", [{"num_beams": 3}, {"num_beams": 4, "num_return_sequences": 2}])
def test_beam_search_equals_peft(load, server, settings):
    """Settings given by name, and by position."""
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, **settings}
    names, prompts = ["fused", "attention"], torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])
    oracles = [tiny.peft_model(load.model, load.paths[name]) for name in names]
    expected = [oracle.generate(prompts[row : row + 1], **options) for row, oracle in enumerate(oracles)]
    with attach(load.model, server) as lora, lora.adapters(names):
        assert torch.equal(load.model.generate(prompts, **options), torch.cat(expected))
        assert torch.equal(load.model.generate(prompts, GenerationConfig(**options)), torch.cat(expected))


def test_sampling_and_return_sequences(load, server):
    options = {"max_new_tokens": 6, "do_sample": True, "num_return_sequences": 3, "pad_token_id": 0}
    prompt = torch.tensor([[5, 6, 7, 8]])
    oracle = tiny.peft_model(load.model, load.paths["experts"])
    torch.manual_seed(3)
    expected = oracle.generate(prompt, **options)
    with attach(load.model, server) as lora, lora.adapters(["experts"]):
        torch.manual_seed(3)
        assert load.model.generate(prompt, **options).tolist() == expected.tolist()


def test_detach_leaves_the_model_as_it_was(load, server):
    ids = torch.tensor([[5, 6, 7]])
    before = load.model(ids).logits
    implementation = load.model.config._experts_implementation
    with attach(load.model, server) as lora:
        assert torch.equal(load.model(ids).logits, before), "outside adapters() it is the base model, bit for bit"
        with lora.adapters(["fused"]):
            assert not torch.equal(load.model(ids).logits, before)
    assert torch.equal(load.model(ids).logits, before)
    assert load.model.config._experts_implementation == implementation
    assert "generate" not in vars(load.model)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in load.model.modules())


def test_base_rows_and_padding_never_leave_the_engine(load, server):
    served, entries = [shard.counters.steps for shard in server.shards], []
    with attach(load.model, server) as lora:
        with lora.adapters([None, None]):
            load.model(torch.tensor([[5, 6], [7, 8]]))
        assert [shard.counters.steps for shard in server.shards] == served
        lora.observe(lambda times: entries.append(times.entries))
        with lora.adapters(["attention"]):
            load.model(torch.tensor([[0, 0, 0, 5, 6]]), attention_mask=torch.tensor([[0, 0, 0, 1, 1]]))
    assert set(entries) == {2}


def test_push_comes_before_the_own_gemm_and_the_answer_during_it(load, server):
    """The engine's GEMM is held until the shards have answered: only a push that came before it ends that."""
    steps, gemms = [], []
    with attach(load.model, server) as lora, lora.adapters(["fused"]):
        lora.observe(steps.append, gemms.append)
        q_proj = load.model.model.layers[0].self_attn.q_proj
        lane = lora.client.lanes[lora.client.placement.owners(Site(0, "qkv"))[0]]
        shard = server.shards[lane.shard]
        answered_during_gemm = []

        def hold(module, args):  # runs after the connector's own pre-hook, as part of the GEMM
            deadline = time.monotonic() + 10
            while lane.link.responded() < lane.pushed and time.monotonic() < deadline:
                shard.serve_once()
            answered_during_gemm.append(lane.link.responded() == lane.pushed > 0)

        handle = q_proj.register_forward_pre_hook(hold)
        load.model(torch.tensor([[5, 6, 7]]))
        handle.remove()
    assert answered_during_gemm == [True]
    for gemm in gemms:
        own = [step for step in steps if step.site == gemm.site]
        assert own, gemm.site
        assert all(step.pushed_ns <= gemm.began_ns <= gemm.ended_ns <= step.waited_ns for step in own)


def test_misuse_is_refused_and_leaves_nothing_behind(load, server):
    with attach(load.model, server) as lora:
        with pytest.raises(ConfigError, match="attached already"):
            attach(load.model, server)
        with pytest.raises(UnknownAdapterError, match="nobody"), lora.adapters(["fused", "nobody"]):
            pass
        for no_list in ("fused", [1, 2]):
            with pytest.raises(ConfigError, match="list"), lora.adapters(no_list):
                pass
        with lora.adapters(["fused"]):
            with pytest.raises(ConfigError, match="already inside"), lora.adapters(["fused"]):
                pass
            with pytest.raises(ConfigError, match="1 names for a batch of 2"):
                load.model(torch.tensor([[5, 6], [7, 8]]))
            load.model.train()
            try:
                with pytest.raises(ConfigError, match="training"):
                    load.model(torch.tensor([[5, 6]]))
            finally:
                load.model.eval()
            load.model(torch.tensor([[5, 6]]))
    with pytest.raises(ConfigError, match="detached"), lora.adapters(["fused"]):
        pass


def test_models_that_do_not_fit_are_refused(server):
    fewer = ({"num_hidden_layers": 2}, GeometryMismatchError, "layers is 2 here and 4 there")
    for changed, error, words in (fewer, ({"dtype": torch.float64}, ConfigError, "float64")):
        other = tiny.make_model("mixtral", **changed)
        with pytest.raises(error, match=words):
            attach(other, server)
        assert not any(module._forward_hooks for module in other.modules())


def test_an_interrupted_forward_pass_leaves_the_next_one_right(load, server):
    ids, mask = pad(load.batch, 0)
    with attach(load.model, server) as lora, lora.adapters(load.names):
        expected = load.model(ids, attention_mask=mask).logits

        def fail(module, args):
            raise KeyboardInterrupt

        for module in (load.model.model.layers[1].self_attn.k_proj, load.model.model.layers[2].mlp.experts.act_fn):
            handle = module.register_forward_pre_hook(fail)
            with pytest.raises(KeyboardInterrupt):
                load.model(ids, attention_mask=mask)
            handle.remove()
            assert torch.equal(load.model(ids, attention_mask=mask).logits, expected)


def test_an_interrupted_push_never_hands_out_another_steps_delta(load, server):
    """Ctrl-C right after a push: its answer must not be taken for the next step's."""
    first, second = torch.tensor([[5, 6, 7]]), torch.tensor([[9, 8, 7]])
    with attach(load.model, server) as lora, lora.adapters(["fused"]):
        expected = load.model(second).logits
        link_type = type(lora.client.session.links[0])
        push, pushes = link_type.push, []

        def interrupted(self, seq, nbytes):
            push(self, seq, nbytes)
            if not pushes:
                pushes.append(seq)
                raise KeyboardInterrupt

        link_type.push = interrupted
        try:
            with pytest.raises(KeyboardInterrupt):
                load.model(first)
            assert torch.equal(load.model(second).logits, expected)
        finally:
            link_type.push = push


def test_handles_of_another_session_are_never_used(load, server):
    """After the server was replaced its handles mean other adapters; a failed hold must not leave old ones."""
    ids = torch.tensor([[5, 6, 7]])
    renumbered = InprocServer(load.spec, {name: load.paths[name] for name in ("qv",)})
    with attach(load.model, server) as lora, lora.adapters(["fused"]):
        load.model(ids)
        lora.client._server = renumbered
        for link in lora.client.session.links:
            link.close()
        for _ in range(2):
            with pytest.raises(UnknownAdapterError, match="fused"):
                load.model(ids)
    renumbered.close()


def test_a_rejoined_server_may_have_another_layout(load, server):
    other = InprocServer(load.spec, load.paths, layout="ep3-pp1", max_step_rows=8)
    with attach(load.model, server) as lora, lora.adapters(load.names):
        load.check(generate(load.model, load.batch, NEW_TOKENS))
        lora.client._server = other
        lora.client.session.links[0].close()
        load.check(generate(load.model, load.batch, NEW_TOKENS))
    other.close()


def test_expert_parallel_sentinels_are_skipped(load, server):
    """An id of num_experts means that the expert is on another rank of the engine."""
    experts = load.model.model.layers[0].mlp.experts
    x, weights = torch.randn(3, load.spec.hidden), torch.tensor([[0.5, 0.5]] * 3)
    index = torch.tensor([[1, 8], [8, 8], [2, 3]])
    with attach(load.model, server) as lora:
        held = lora.client.acquire(["fused"])[0]
        lora._forward.batch = Batch.of([Run.of(held, 0, 3)], decode=True)
        out = experts(x, index, weights)
        alone = experts(x, torch.tensor([[1, 1], [1, 1], [2, 3]]), torch.tensor([[0.5, 0.0], [0.0, 0.0], [0.5, 0.5]]))
        lora._forward.batch = None
    assert torch.allclose(out, alone, atol=1e-5)


def test_a_copy_of_an_attached_model_is_a_plain_one(load, server):
    ids = torch.tensor([[5, 6, 7]])
    base = load.model(ids).logits
    with attach(load.model, server) as lora, lora.adapters(["fused"]):
        ours = load.model(ids).logits
        copied = copy.deepcopy(load.model)
        assert torch.allclose(copied(ids).logits, base, atol=1e-5)
        theirs = tiny.peft_model(load.model, load.paths["fused"])(ids).logits
        assert torch.allclose(ours, theirs, atol=1e-4)
        assert torch.equal(load.model(ids).logits, ours)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_are_grouped_alike_with_and_without_the_host(dtype):
    """What a GPU does; experts of another rank (4 of 4) come last, and add nothing."""
    generator = torch.Generator().manual_seed(3)
    experts_N = torch.randint(0, 5, (24,), generator=generator)
    x = torch.randn(24, 16, generator=generator, dtype=dtype)
    weight = torch.randn(4, 24, 16, generator=generator, dtype=dtype)
    results = []
    for groups in (OnHost(experts_N, 4), OnDevice(experts_N, 4)):
        out = groups.kept(groups.multiply(x[groups.order_N], weight))
        results.append(torch.zeros(24, 24, dtype=dtype).index_add_(0, groups.order_N, out))
        here = experts_N < 4
        assert torch.equal(groups.order_N[groups.place_N[here]], torch.nonzero(here).squeeze(1))
    torch.testing.assert_close(*results)
    assert (results[0][experts_N == 4] == 0).all()
