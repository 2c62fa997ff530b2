"""A vLLM engine on base weights with a hot adapter in them, against PEFT, and through the end of its server."""

import pytest

from client_connector.directory import AdapterDirectory
from lora_server.adapters import validate_adapter
from lora_server.demo.engine import EngineAnswer, Sequence
from lora_server.merge import Merge
from tests.support import alora
from tests.support.serving import settled_steps
from tests.support.workload import NEW_TOKENS
from tests.vllm.engines import Engine, serve

IN_ORDER = True  # the last test ends the server
HOT = "fused"


@pytest.fixture(scope="module")
def server(load, kind, scratch):
    with serve(load, f"{kind}-merged", scratch) as running:
        yield running


@pytest.fixture(scope="module")
def merged(load, tmp_path_factory):
    """The directory, and a path by which vLLM's front end names the merged version."""
    out = tmp_path_factory.mktemp("merged") / "out"
    adapter, version = validate_adapter(load.paths[HOT], load.spec)
    with adapter:
        Merge(load.base, adapter, version, HOT, out).run()
    return out, f"lora_server:{HOT}@{version}"


@pytest.fixture(scope="module")
def engine(merged, server, scratch):
    with Engine(merged[0], server.address, scratch / "engine-merged.log") as running:
        yield running


def test_tokens_of_hot_cold_and_base_rows_equal_peft(load, engine):
    load.check(engine.answers(load.batch, NEW_TOKENS), 1e-3)


def test_rows_before_an_invocation_are_the_base_models(load, server, engine, tmp_path):
    paths = alora.make(load.model, tmp_path)
    directory = AdapterDirectory(server.address)
    for name, path in paths.items():
        directory.add(name, str(path))
    directory.close()
    case = alora.case(load.model, paths)
    replies = engine.generate(case.batch, NEW_TOKENS)
    case.check([EngineAnswer(reply["tokens"], reply["logprobs"]) for reply in replies])


def test_what_cannot_be_with_merged_weights_is_refused_at_the_start(merged, server, scratch):
    for variable, value in (("LORA_SERVER_ON_FAILURE", "base_model"), ("LORA_SERVER_TRANSPORT", "gpu")):
        with pytest.raises(RuntimeError, match=f"weights that contain {HOT}"):
            Engine(merged[0], server.address, scratch / "refused.log", {variable: value})


def test_hot_requests_send_nothing_and_need_no_server(load, server, merged, engine):
    prompt = load.batch[0].prompt
    expected = load.answer(load.paths[HOT], prompt)
    before = settled_steps(server.address)

    def hot():
        return engine.generate([Sequence(prompt, HOT)], NEW_TOKENS, path=merged[1])[0]

    assert hot()["tokens"] == expected.tokens
    assert settled_steps(server.address) == before
    server.stop()
    assert hot()["tokens"] == expected.tokens
    assert engine.generate([Sequence(prompt, None)], NEW_TOKENS)[0]["finish_reason"] == "error"
