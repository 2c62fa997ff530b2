"""The OpenAI server: names of the LoRA server just work, unknown ones are 404, load and unload, failures."""

import contextlib
import http.client
import json
import os
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from client_connector.serving.settings import Settings
from lora_server import __version__
from lora_server.demo import tiny
from lora_server.errors import AdapterExistsError
from lora_server.wire.waits import WAITS
from tests.support.serving import HANG_SECONDS, kill, metric, status, until
from tests.support.workload import NEW_TOKENS
from tests.vllm.engines import ApiServer, serve, tokens

IN_ORDER = True  # the last test ends the server
LONG = 120


@pytest.fixture(scope="module")
def server(load, kind, scratch):
    """The tests kill its parts, and in the end all of it."""
    with serve(load, f"{kind}-api", scratch) as running:
        yield running


@pytest.fixture(scope="module")
def api(load, server, scratch):
    with ApiServer(load.base, server.address, scratch / "api.log") as running:
        yield running


def test_names_of_the_server_just_work_and_others_are_404(load, api):
    code, answer = api.request("GET", "/v1/models")
    assert code == 200 and {card["id"] for card in answer["data"]} >= {"base", *load.paths}
    for sequence, expected in zip(load.batch, load.expected, strict=True):
        code, answer = api.complete(sequence.adapter or "base", sequence.prompt, NEW_TOKENS)
        assert code == 200, answer
        assert tokens(answer) == expected.tokens, sequence.adapter
        assert answer["model"] == (sequence.adapter or "base")
        logprobs = answer["choices"][0]["logprobs"]["token_logprobs"]
        assert max(abs(a - b) for a, b in zip(logprobs, expected.logprobs, strict=True)) <= 1e-3
    code, answer = api.complete("nobody", load.batch[0].prompt, NEW_TOKENS)
    assert code == 404
    assert "'nobody'" in answer["error"]["message"] and "not registered" in answer["error"]["message"]


def test_vllms_log_says_whom_it_is_attached_to(load, api, server):
    """In its own format, by the worker, once."""
    told = re.findall(r"^\(.*\) INFO .* \[worker.py:\d+\] (attached to the LoRA server .*)$", api.log.read_text(), re.M)
    expected = f"connector={__version__} server={server.address} model={status(server.address).model} layout=ep2-pp2 "
    expected += f"transport=shm wire=exact adapters={len(load.paths)}"
    assert told == [f"attached to the LoRA server {expected}"]


def test_what_a_request_waited_for_is_measured(load, api, server):
    """The lookup of its name at vLLM's own /metrics; its name, place, weights and engine at the server's."""
    stages = [f'lora_server_request_wait_seconds_count{{tenant="(operator)",what="{what}"}}' for what in WAITS]

    def counts():
        ours = server.get("/metrics")[1]
        looked_up = metric(api.request("GET", "/metrics")[1], "lora_server_name_seconds_count")
        return [looked_up, *(metric(ours, stage) for stage in stages)]

    before = counts()  # a heartbeat may tell of an earlier request's waits only later
    assert api.complete("fused", load.batch[0].prompt, NEW_TOKENS)[0] == 200
    assert counts()[0] == before[0] + 1
    until(lambda: all(one > was for one, was in zip(counts(), before, strict=True)), "its waits are told")
    assert metric(api.request("GET", "/metrics")[1], "lora_server_name_seconds_sum") > 0


def test_added_while_it_serves_and_removed(load, api, directory, tmp_path):
    tiny.make_adapter(load.model, tmp_path / "law", seed=31, lora_rank=4, targets="all")
    prompt = load.batch[0].prompt
    assert api.complete("law", prompt, NEW_TOKENS)[0] == 404
    directory.add("law", str(tmp_path / "law"))
    code, answer = api.complete("law", prompt, NEW_TOKENS)
    assert (code, tokens(answer)) == (200, load.answer(tmp_path / "law", prompt).tokens)
    directory.remove("law")
    assert api.complete("law", prompt, NEW_TOKENS)[0] == 404


def test_load_and_unload(load, api, directory, tmp_path):
    tiny.make_adapter(load.model, tmp_path / "mine", seed=32, lora_rank=3, targets="experts")
    prompt = load.batch[1].prompt
    body = {"lora_name": "mine", "lora_path": str(tmp_path / "mine")}
    code, answer = api.request("POST", "/v1/load_lora_adapter", body)
    assert code == 200, answer
    assert "mine" in {adapter.name for adapter in directory.list()}, "on the server, for all its engines"
    assert tokens(api.complete("mine", prompt, NEW_TOKENS)[1]) == load.answer(tmp_path / "mine", prompt).tokens
    assert api.request("POST", "/v1/load_lora_adapter", body)[0] == 400, "loaded already"
    code, answer = api.request("POST", "/v1/unload_lora_adapter", {"lora_name": "mine"})
    assert code == 200, answer
    assert "mine" not in {adapter.name for adapter in directory.list()}
    assert api.complete("mine", prompt, NEW_TOKENS)[0] == 404
    assert api.request("POST", "/v1/unload_lora_adapter", {"lora_name": "mine"})[0] == 404


def test_a_bad_adapter_is_refused_with_the_reason(load, api, tmp_path):
    tiny.make_adapter(load.model, tmp_path / "bad", seed=33, lora_rank=3, targets="experts")
    config = tmp_path / "bad/adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"use_dora": True}))
    body = {"lora_name": "bad", "lora_path": str(tmp_path / "bad")}
    code, answer = api.request("POST", "/v1/load_lora_adapter", body)
    assert code == 400 and "DoRA" in answer["error"]["message"]
    code, answer = api.request("POST", "/v1/load_lora_adapter", body | {"lora_path": "/no/such/place"})
    assert code == 400 and "/no/such/place" in answer["error"]["message"]
    assert api.complete("bad", load.batch[0].prompt, NEW_TOKENS)[0] == 404
    assert api.complete("fused", load.batch[0].prompt, NEW_TOKENS)[0] == 200


def test_no_adapter_gets_the_base_models_name(api, directory, load):
    """vLLM would answer from the base model, and nobody would see it."""
    with pytest.raises(AdapterExistsError, match=r"'base': engine .* serves its base model under this name"):
        directory.add("base", str(load.paths["fused"]))
    for path in (str(load.paths["fused"]), "base"):
        code, answer = api.request("POST", "/v1/load_lora_adapter", {"lora_name": "base", "lora_path": path})
        assert code == 400 and "'base' conflicts" in answer["error"]["message"]


def test_an_alora_that_is_not_invoked_says_so(load, api, directory, tmp_path):
    tiny.make_adapter(load.model, tmp_path / "called", seed=34, lora_rank=3, targets="qv", invocation=[17, 18])
    directory.add("called", str(tmp_path / "called"))
    prompt = load.batch[0].prompt
    code, answer = api.complete("called", prompt, NEW_TOKENS)
    assert (code, tokens(answer)) == (200, load.answer(None, prompt).tokens)
    assert answer["choices"][0]["stop_reason"].startswith("lora-server: base_model: not_invoked")
    assert answer["kv_transfer_params"]["lora_server"]["answered_by"] == "base_model"
    assert 'lora_server_requests_total{outcome="not_invoked"} 1.0' in api.request("GET", "/metrics")[1]
    code, answer = api.complete("called", [*prompt, 17, 18], NEW_TOKENS)
    assert tokens(answer) == load.answer(tmp_path / "called", [*prompt, 17, 18]).tokens
    assert answer["choices"][0]["stop_reason"] is None
    directory.remove("called")


def test_a_shard_that_dies_is_waited_for(load, api, server, directory):
    """The request goes on with its adapter when the shard is back, and beside it the base model answers."""
    calm = tokens(api.complete("fused", load.batch[0].prompt, LONG)[1])
    with ThreadPoolExecutor(2) as pool:
        running = [pool.submit(api.complete, name, load.batch[0].prompt, LONG) for name in ("fused", "base")]
        until(lambda: any(adapter.holders for adapter in directory.list()), "it is held")
        os.kill(status(server.address).shards[1].pid, signal.SIGKILL)
        (code, answer), (base_code, base) = (one.result(HANG_SECONDS) for one in running)
    assert (code, tokens(answer)) == (200, calm) and len(calm) == LONG, answer
    assert (base_code, len(tokens(base))) == (200, LONG)
    until(lambda: status(server.address).ready and status(server.address).shards[1].restarts == 1, "it is back")
    code, answer = api.complete("fused", load.batch[0].prompt, NEW_TOKENS)
    assert (code, tokens(answer)) == (200, load.expected[0].tokens)


def test_a_name_that_was_never_asked_for_waits_for_a_controller_that_is_away(load, api, server, directory):
    """Until it is back, or has been away for timeout_seconds: on a busy machine it may need longer than that."""
    path, prompt = load.paths["fused"], load.batch[0].prompt
    directory.add("unseen", str(path))
    os.kill(status(server.address).pid, signal.SIGKILL)
    asked = time.monotonic()
    code, answer = api.complete("unseen", prompt, NEW_TOKENS)
    assert code == 200 or time.monotonic() - asked >= Settings.timeout_seconds, answer
    until(lambda: api.complete("unseen", prompt, 1)[0] == 200, "it is served", HANG_SECONDS)
    assert tokens(api.complete("unseen", prompt, NEW_TOKENS)[1]) == load.answer(path, prompt).tokens
    directory.remove("unseen")


@contextlib.contextmanager
def posted(api, body):
    """The answer to a request for a completion; its connection ends with the block."""
    with contextlib.closing(http.client.HTTPConnection(api.address, timeout=HANG_SECONDS)) as connection:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        yield connection.getresponse()


def test_a_client_that_hangs_up_releases_its_adapter(load, api, directory):
    body = {"model": "fused", "prompt": load.batch[0].prompt, "max_tokens": 400, "min_tokens": 400, "stream": True}
    with posted(api, body) as answer:
        assert answer.readline().startswith(b"data:")
        until(lambda: any(adapter.holders for adapter in directory.list()), "it is held")
    until(lambda: not any(adapter.holders for adapter in directory.list()), "it is released")


def test_an_outage_is_503_and_few_lines(load, api, server, servers):
    """The last test here: the server that the others shared is gone, and another stands in its place."""
    prompt, earlier = load.batch[0].prompt, len(api.log.read_text())
    assert api.complete("fused", prompt, 1)[0] == 200
    kill(server)
    answers = [api.complete("fused", prompt, 1) for _ in range(40)]
    assert {code for code, _ in answers} == {503}, answers
    assert {answer["error"]["type"] for _, answer in answers} == {"ServiceUnavailableError"}
    with posted(api, {"model": "never-seen", "prompt": prompt, "max_tokens": 1}) as answer:
        assert (answer.status, answer.getheader("Retry-After")) == (503, "1")
        assert json.load(answer)["error"]["type"] == "ServiceUnavailableError"
    assert api.complete("base", prompt, 1)[0] == 200
    servers.start("--listen", server.address)
    until(lambda: api.complete("fused", prompt, 1)[0] == 200, "adapters are served again", HANG_SECONDS)
    log = api.log.read_text()[earlier:]
    assert 1 <= log.count("request failed") < 20, log  # one, and one more for each ten seconds
    assert "LoRA server lost; joining it again" in log and "rejoined" in log
