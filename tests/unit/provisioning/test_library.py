"""--from-adapters: real ranks, sites and bytes, of a directory, a list and a server that is not there."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from lora_server import spec as specs
from lora_server.placement import Layout
from provisioning.inputs import InputError
from provisioning.model import library, memory
from tests.support import provision as support
from tests.support.provision import SLO, provision, typed

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
    save_file(tensors, path / "adapter_model.safetensors")
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
    assert asked.lora(Layout(2, 1)).total == pytest.approx(plain.lora(Layout(2, 1)).total)


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
    spec, layout = specs.load(model), Layout(1, 1)
    in_all = spec.adapter_bytes(8) + 2 * 2 * 2 * 8 * (64 + 64)
    assert spec.adapter_bytes(both.model.lora_rank) == pytest.approx(in_all, abs=2)
    assert only.model.lora_rank < 1.1 and memory.fullest_shard_bytes(spec, layout, only.model.lora_rank) == 2 << 20
    assert both.model.attention_share == only.model.attention_share == 1
    rows = 8 * 2 * (64 + spec.q_width)
    link = both.model.cluster.link_bytes_per_us
    wire = both.lora(layout).receive.value - 2 * experts.lora(layout).receive.value
    assert wire == pytest.approx(rows / link - (experts.lora(layout).receive.value - 55.2))
    assert both.lora(layout).send.value > experts.lora(layout).send.value


def test_the_command_and_a_list_of_a_server(tmp_path, model):
    adapter(tmp_path / "adapters" / "law", 8, attention=True)
    asked = typed(slo=SLO, model=model, instances=2, batch_size=8, from_adapters=tmp_path / "adapters")
    shown = provision(*asked, "--no-simulate")
    assert shown.exit_code == 0, shown.output
    assert f"1 adapter of rank 8 ({tmp_path / 'adapters'})" in shown.stdout
    rows = [{"name": "law", "lora_rank": 16, "bytes": 2 * specs.load(model).adapter_bytes(8)}]
    (tmp_path / "list.json").write_text(json.dumps(rows))
    assert question(model, tmp_path / "list.json").model.lora_rank == pytest.approx(16)


def broken(path):
    adapter(path / "law", 8)
    (path / "law" / "adapter_model.safetensors").write_bytes(b"\xff" * 20)


@pytest.mark.parametrize(("make", "said"), [
    (lambda path: path.mkdir(), "holds no adapters"),
    (broken, "law cannot be read as a PEFT adapter"),
    (lambda path: path.write_text("{}"), "holds no adapters"),
    (lambda path: path.write_text('[{"name": "law"}]'), "lora-server adapters list --json"),
    (lambda path: path.write_text('[{"name": "law", "bytes": 0, "lora_rank": 1}]'), "'law' has no weights"),
    (lambda path: None, "is no directory, no file and no HOST:PORT"),
])  # fmt: skip
def test_what_cannot_be_read_is_refused(tmp_path, make, said):
    make(tmp_path / "adapters")
    with pytest.raises(InputError, match=f"^--from-adapters: .*{said}"):
        library.read(str(tmp_path / "adapters"))


def test_who_is_called_must_be_there(tmp_path, model):
    adapter(tmp_path / "adapters" / "law", 8)
    (tmp_path / "c.csv").write_text("code,9\n")
    with pytest.raises(InputError, match=r"^--from-adapters: .* has no adapter 'code', which is called"):
        question(model, tmp_path / "adapters", counts=tmp_path / "c.csv")
    with pytest.raises(InputError, match=r"^--adapters: got 2, but .* has 1"):
        question(model, tmp_path / "adapters", adapters=2)


def test_a_server_that_does_not_answer_is_one_line():
    with pytest.raises(InputError, match=r"^--from-adapters: 127.0.0.1:1: .+") as caught:
        library.read("127.0.0.1:1")
    assert "\n" not in str(caught.value)
