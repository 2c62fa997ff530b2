"""Routers that know nothing of adapters in front of two vLLM engines: any engine serves any adapter."""

import os
import sys
from pathlib import Path

import pytest

from lora_server.demo import tiny
from lora_server.demo.launch import free_address, free_ports, running_server
from tests.support.doc_commands import blocks
from tests.support.engine_api import EngineApi
from tests.support.serving import until
from tests.vllm.engines import ApiServer

pytestmark = pytest.mark.long
ADAPTERS, NEW_TOKENS = 50, 3
BIN = Path(sys.executable).parent
IN_ORDER = True  # the last test ends an engine
COMMANDS = {
    command.split()[0]: command
    for block in blocks("deploy/README.md")
    for command in block.commands
    if "--worker-urls" in command
}


@pytest.fixture(scope="module")
def answers(load, tmp_path_factory):
    """PEFT's, by the names of 50 adapters, and their directory."""
    folder = tmp_path_factory.mktemp("fifty")
    prompt, found = load.batch[0].prompt, {}
    for index in range(ADAPTERS):
        path = folder / f"adapter-{index}"
        tiny.make_adapter(load.model, path, seed=index, lora_rank=2, targets="qv")
        found[path.name] = load.answer(path, prompt, NEW_TOKENS).tokens
    return folder, found


@pytest.fixture(scope="module")
def engines(load, answers, scratch):
    """One has the server's address, the other a list of which the first is away."""
    server_flags = ["--base-model", str(load.base), "--adapters", str(answers[0]), "--layout", "ep1-pp1"]
    with running_server(scratch / "fifty.log", server_flags) as server:
        with ApiServer(load.base, server.address, scratch / "first.log") as first:
            address = f"{free_address()},{server.address}"
            with ApiServer(load.base, address, scratch / "second.log") as second:
                yield [first, second]


class Routed(ApiServer):
    """A router, by the command of the page at ports that are free."""

    def __init__(self, command, engines, log):
        port = free_ports()
        own = {"8100": str(port)} | {f"127.0.0.1:{8001 + i}": one.address for i, one in enumerate(engines)}
        for theirs, ours in own.items():
            command = command.replace(theirs, ours)
        command += f" --prometheus-port {free_ports()} --host 127.0.0.1"
        name, *arguments = command.split()
        EngineApi.__init__(self, f"127.0.0.1:{port}", [str(BIN / name), *arguments], dict(os.environ), log)


@pytest.fixture(scope="module", params=sorted(COMMANDS))
def router(request, engines, scratch):
    if not (BIN / request.param).exists():
        pytest.skip(f"{request.param} is not installed here")
    with Routed(COMMANDS[request.param], engines, scratch / f"{request.param}.log") as it:
        yield it


def requests(engine):
    """How many requests an engine has answered."""
    lines = engine.request("GET", "/metrics")[1].splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:request_success_total"))


def ask(api, name, prompt):
    """Ask with text, as sglang-router takes no tokens; returns the code, and the words or the error."""
    body = {"model": name, "prompt": words(prompt), "max_tokens": NEW_TOKENS, "temperature": 0}
    code, answer = api.request("POST", "/v1/completions", body)
    return code, answer["choices"][0]["text"].strip() if code == 200 else answer


def words(tokens):
    """The text of tokens, in which special ones are not seen."""
    return " ".join(f"w{token}" for token in tokens if token >= tiny.FIRST_WORD)


def wrong(api, answers, prompt):
    """The adapters whose words are not PEFT's, asked one after the other, and what came instead."""
    asked = {name: ask(api, name, prompt) for name in answers[1]}
    return {name: got for name, got in asked.items() if got != (200, words(answers[1][name]))}


def test_every_answer_is_right_whichever_engine_gives_it(router, engines, answers, load):
    """The second time each adapter's request goes to the other engine."""
    prompt, before = load.batch[0].prompt, [requests(one) for one in engines]
    assert wrong(router, answers, prompt) == {}
    assert ask(router, "base", prompt)[0] == 200
    assert wrong(router, answers, prompt) == {}
    until(lambda: sum(map(requests, engines)) == sum(before) + 2 * ADAPTERS + 1, "metrics are told")
    assert all(requests(one) - of_before >= ADAPTERS for one, of_before in zip(engines, before, strict=True))


def test_an_unknown_adapter_is_404_through_a_router(router, load):
    code, answer = ask(router, "nobody", load.batch[0].prompt)
    assert code == 404 and "not registered" in str(answer)


def test_the_other_engine_goes_on_when_one_is_killed(engines, answers, load, scratch):
    command = next((one for name, one in sorted(COMMANDS.items()) if (BIN / name).exists()), "")
    if not command:
        pytest.skip("no router is installed here")
    with Routed(command, engines, scratch / "last.log") as router:
        engines[0].process.kill()
        engines[0].process.wait(60)
        assert wrong(router, answers, load.batch[0].prompt) == {}
