"""An engine on merged weights while its server is away, and after the merged adapter was updated there."""

import pytest

from client_connector.transformers import attach
from lora_server.adapters import validate_adapter
from lora_server.demo import tiny
from lora_server.demo.engine import Sequence, generate, load_model
from lora_server.demo.launch import running_server
from lora_server.errors import LoraServerError, UnknownAdapterError
from lora_server.merge import Merge
from lora_server.merged import MERGED
from tests.support.serving import cli, flags, status, until
from tests.support.workload import NEW_TOKENS

HOT = "fused"


def test_hot_requests_need_no_server_and_an_update_makes_the_merged_version_a_cold_one(load, tmp_path):
    adapter, version = validate_adapter(load.paths[HOT], load.spec)
    with adapter:
        Merge(load.base, adapter, version, HOT, tmp_path / "out").run()
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
        updated = cli("adapters", "update", HOT, str(tmp_path / "new"), "--server", server.address)
        assert updated.returncode == 0, updated.stderr
        check_all(lora)
        shown = " ".join(cli("status", "--server", server.address).stdout.split())
        (draining,) = status(server.address).draining
        assert draining.version == version != draining.serves
        assert f"draining: {HOT} {version[:12]}: held by client 1; {draining.serves[:12]} serves" in shown
    with running_server(tmp_path / "log3", kept) as server:
        with attach(model, server=server.address) as lora:
            check_all(lora)
        until(lambda: not status(server.address).draining, "it went with its last holder")
        record = tmp_path / "out" / MERGED
        record.write_text(record.read_text().replace(version, "0" * 64))
        with pytest.raises(UnknownAdapterError, match="version 000000000000 is not known here"):
            attach(model, server=server.address)
