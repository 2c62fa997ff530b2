"""SGLang's API: names of the LoRA server just work, unknown ones are 404; load, update and unload; what is aborted."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from client_connector.directory import AdapterDirectory
from lora_server.demo import tiny
from lora_server.demo.engine import Sequence
from tests.sglang.engines import FLAGS
from tests.support import alora
from tests.support.serving import HANG_SECONDS, ask, listed, until
from tests.support.workload import NEW_TOKENS


@pytest.fixture(scope="module")
def directory(server):
    directory = AdapterDirectory(server.address)
    yield directory
    directory.close()


def complete(engine, model: str, prompt: list[int], new_tokens: int = NEW_TOKENS):
    body = {"model": model, "prompt": prompt, "max_tokens": new_tokens, "temperature": 0, "ignore_eos": True}
    return engine.request("POST", "/v1/completions", body)


def text_of(engine, prompt: list[int], adapter: str | None) -> str:
    (reply,) = engine.generate([Sequence(prompt, adapter)], NEW_TOKENS)[1]
    return reply["text"]


def test_names_of_the_server_just_work_and_others_are_404(load, engine):
    code, answer = engine.request("GET", "/v1/models")
    assert code == 200 and {card["id"] for card in answer["data"]} == {"base", *load.paths}
    for sequence in load.batch:
        for model in [sequence.adapter, f"base:{sequence.adapter}"] if sequence.adapter else ["base"]:
            code, answer = complete(engine, model, sequence.prompt)
            assert code == 200, answer
            assert answer["choices"][0]["text"] == text_of(engine, sequence.prompt, sequence.adapter), model
    for code, answer in (
        complete(engine, "unknown", load.batch[0].prompt),
        engine.generate([Sequence(load.batch[0].prompt, "unknown")], NEW_TOKENS),
    ):
        assert code == 404
        assert "'unknown'" in json.dumps(answer) and "not registered" in json.dumps(answer)
    streamed = {"input_ids": load.batch[0].prompt, "lora_path": "unknown", "stream": True}
    code, answer = engine.request("POST", "/generate", streamed)
    assert code == 404 and "not registered" in json.dumps(answer)


def test_an_adapters_id_is_nothing_that_a_caller_can_say(load, engine):
    body = {"input_ids": load.batch[0].prompt, "lora_id": "lora_server:0:0:0:fused"}
    code, answer = engine.request("POST", "/generate", body)
    assert code == 400 and "name the adapter in lora_path" in json.dumps(answer)


def test_an_api_that_does_not_look_at_a_models_name_refuses_an_adapters(load, engine):
    for path, body in (
        ("/v1/responses", {"model": "fused", "input": "hello"}),
        ("/v1/score", {"model": "fused", "query": [5, 6], "items": [[7]], "label_token_ids": [8]}),
        ("/api/generate", {"model": "fused", "prompt": "hello"}),
    ):
        code, answer = engine.request("POST", path, body)
        assert code == 404 and "'fused'" in json.dumps(answer), (path, answer)


def test_added_and_updated_while_it_serves_and_removed(load, server, engine, tmp_path):
    for version, seed in enumerate((31, 32)):
        tiny.make_adapter(load.model, tmp_path / str(version), seed=seed, lora_rank=4, targets="all")
    prompt = load.batch[0].prompt
    load_it = {"lora_name": "law", "lora_path": str(tmp_path / "0")}
    code, answer = engine.request("POST", "/load_lora_adapter", load_it)
    assert code == 200 and answer["success"], answer
    assert engine.answer(prompt, "law", NEW_TOKENS) == load.answer(tmp_path / "0", prompt).tokens
    ask(server.address, "Update", name="law", uri=str(tmp_path / "1"))
    expected = load.answer(tmp_path / "1", prompt).tokens
    until(lambda: engine.answer(prompt, "law", NEW_TOKENS) == expected, "the new version answers")
    code, answer = engine.request("POST", "/unload_lora_adapter", {"lora_name": "law"})
    assert code == 200 and answer["success"], answer
    assert engine.generate([Sequence(prompt, "law")], NEW_TOKENS)[0] == 404
    code, answer = engine.request("POST", "/unload_lora_adapter", {"lora_name": "fused"})
    assert code == 400 and "not added by this engine" in answer["error_message"]


def test_an_activated_lora_acts_from_its_invocation_on(load, engine, directory, tmp_path):
    """Also where another prompt that begins alike was invoked elsewhere; without its invocation it is the caller's
    mistake."""
    paths = alora.make(load.model, tmp_path)
    for name, path in paths.items():
        directory.add(name, str(path))
    for name, prompt in alora.prompts().items():
        code, reply = engine.generate([Sequence(prompt, "check")], NEW_TOKENS)
        if name in ("cut off", "absent"):
            assert code == 400 and "lacks its invocation" in json.dumps(reply)
            continue
        expected = alora.answer(load.model, paths, Sequence(prompt, "check"))
        assert code == 200 and reply[0]["output_ids"] == expected.tokens, name


def test_what_is_aborted_holds_nothing(load, server, engine):
    """By the name of the request, while it is decoding."""
    body = {
        "input_ids": load.batch[0].prompt,
        "lora_path": "fused",
        "rid": "long",
        "sampling_params": {"max_new_tokens": 400, "ignore_eos": True},
    }
    with ThreadPoolExecutor() as pool:
        call = pool.submit(engine.request, "POST", "/generate", body)
        until(lambda: holders(server) == 1, "it is held")
        assert engine.request("POST", "/abort_request", {"rid": "long"})[0] == 200
        call.result(HANG_SECONDS)
    until(lambda: holders(server) == 0, "it is released")


def holders(server) -> int:
    return listed(server.address)["fused"].holders


@pytest.mark.parametrize(
    ("flag", "environment", "words"),
    [
        (("--pp-size", "2"), {}, "pp_size: got 2, expected 1"),
        (("--nnodes", "2"), {}, "nnodes: got 2, expected 1"),
        (("--enable-mixed-chunk",), {}, "enable_mixed_chunk: got True"),
        (("--lora-paths", "law=/tmp"), {}, "lora_paths: got"),
        (("--enable-streaming-session",), {}, "enable_streaming_session: got True"),
        (("--grpc-port", "9"), {}, "grpc_port: got 9"),
        ((), {"SGLANG_GRPC_PORT": "0"}, "SGLANG_GRPC_PORT: got 0"),
        (("--api-key", "x"), {"LORA_SERVER_TENANTS": "true"}, "api_key: got one with LORA_SERVER_TENANTS"),
        ((), {"LORA_SERVER_TENANTS": "yes"}, "LORA_SERVER_TENANTS: got 'yes', expected true or false"),
        ((), {"LORA_SERVER_TENANTS": "true", "LORA_SERVER_ADDRESS": ""}, "LORA_SERVER_ADDRESS: got none"),
    ],
)
def test_what_is_not_supported_is_refused_in_one_line(load, server, flag, environment, words):
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(load.base), *flag]
    command += [word for name, value in FLAGS.items() for word in (f"--{name}", value)]
    own = {"LORA_SERVER_ADDRESS": server.address, "SGLANG_USE_CPU_ENGINE": "1"}
    environment = os.environ | own | environment
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HANG_SECONDS)
    assert done.returncode != 0
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("lora-server: ")]
    assert words in line and "Traceback" not in done.stderr
