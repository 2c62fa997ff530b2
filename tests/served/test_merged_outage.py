"""An engine on merged weights while its server is away, and after the merged adapter was updated there."""

import pytest

from client_connector.transformers import attach
from lora_server.demo import tiny
from lora_server.demo.engine import Sequence, generate, load_model
from lora_server.demo.launch import running_server
from lora_server.errors import GeometryMismatchError, LoraServerError, UnknownAdapterError
from lora_server.merge.checkpoint import base_weights
from lora_server.merged import MERGED, find_merged
from tests.support.serving import cli, flags, status, until
from tests.support.workload import NEW_TOKENS, merge

HOT = "fused"


def test_weights_that_another_base_model_was_merged_into_are_refused(load, tmp_path):
    """They have the same sizes: the server knows its base model by the fingerprint of its weights."""
    tiny.save_model(tiny.make_model(load.kind, seed=1), tmp_path / "base")
    record = merge(tmp_path / "base", load.paths[HOT], HOT, tmp_path / "out")
    model = load_model(tmp_path / "out")
    with running_server(tmp_path / "log", flags(load, "--adapter-root", "/")) as server:
        theirs = base_weights(load.base)
        expected = f"merged into weights {record.base_weights}, and the server's .* and weights {theirs}"
        with pytest.raises(GeometryMismatchError, match=expected):
            attach(model, server=server.address)
        assert not status(server.address).joined, "it left"
        check_merges_by_name(load, server.address, tmp_path)


def check_merges_by_name(load, address, tmp_path):
    """The command takes an adapter's files and version from the server, unless the files are others by now."""

    def merge(name):
        asked = ("merge", "--base-model", str(load.base), "--adapter", name, "--out", str(tmp_path / f"+{name}"))
        return cli(*asked, "--server", address)

    tiny.make_adapter(load.model, tmp_path / "law", seed=7, lora_rank=2, targets="qv")
    assert cli("adapters", "add", "law", str(tmp_path / "law"), "--server", address).returncode == 0
    assert merge("law").returncode == 0
    with attach(load_model(tmp_path / "+law"), server=address) as lora, lora.adapters(["law"]):
        assert (find_merged(tmp_path / "+law").name, lora.client.lost()) == ("law", None)
    tiny.make_adapter(load.model, tmp_path / "law", seed=8, lora_rank=2, targets="qv")
    assert "its files were changed" in merge("law").stderr
    assert "adapter 'none'" in merge("none").stderr


def test_hot_requests_need_no_server_and_an_update_makes_the_merged_version_a_cold_one(load, tmp_path):
    version = merge(load.base, load.paths[HOT], HOT, tmp_path / "out").version
    model, prompt = load_model(tmp_path / "out"), load.batch[0].prompt

    def tokens(lora, name):
        with lora.adapters([name]):
            return generate(model, [Sequence(prompt, name)], NEW_TOKENS)[0].tokens

    def expected(path):
        return load.answer(path, prompt).tokens

    tiny.make_adapter(load.model, tmp_path / "new", seed=77, lora_rank=3, targets="all")
    with running_server(tmp_path / "log", flags(load, "--adapter-root", "/")) as server:
        with attach(model, server=server.address, timeout_seconds=1.0) as lora:
            assert tokens(lora, HOT) == expected(load.paths[HOT])
            server.stop()
            assert tokens(lora, HOT) == expected(load.paths[HOT])
            for name in ("attention", None):
                with pytest.raises(LoraServerError):
                    tokens(lora, name)
    kept = flags(load, "--adapter-root", "/", "--data-dir", str(tmp_path / "data"))

    def check_all(lora):
        assert tokens(lora, HOT) == expected(tmp_path / "new") != expected(load.paths[HOT])
        assert tokens(lora, "attention") == expected(load.paths["attention"])
        assert tokens(lora, None) == expected(None)

    with running_server(tmp_path / "log2", kept) as server, attach(model, server=server.address) as lora:
        with attach(load.model, server=server.address) as other, other.adapters([HOT]):
            new = ("adapters", "update", HOT, str(tmp_path / "new"), "--seconds", "0")
            updated = cli(*new, "--server", server.address)
            assert updated.returncode == 0, updated.stderr
            until(lambda: list(status(server.address).draining[0].clients) == [1], "it is taken from the other engine")
        check_all(lora)
        shown = " ".join(cli("status", "--server", server.address).stdout.split())
        (draining,) = status(server.address).draining
        assert draining.version == version != draining.serves
        held = "held by client 1, in the base weights of client 1, which keeps it until its restart on a new merge"
        assert f"draining: {HOT} {version[:12]}: {held}; {draining.serves[:12]} serves" in shown
    with running_server(tmp_path / "log3", kept) as server:
        with attach(model, server=server.address) as lora:
            check_all(lora)
        until(lambda: not status(server.address).draining, "it went with its last holder")
        record = tmp_path / "out" / MERGED
        record.write_text(record.read_text().replace(version, "0" * 64))
        with pytest.raises(UnknownAdapterError, match="version 000000000000 is not known here"):
            attach(model, server=server.address)
